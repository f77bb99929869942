/* Types and functions that the C files of the shared-memory transport share. */
#include <stdatomic.h>
#include <stdint.h>

/* Called every 0.1 s of waiting with the rank waited for, the time waited and why that rank stopped (0: it has not).
 * Sets `go_on` to 1 to wait on. */
typedef void (*shoal_look)(int64_t late, int64_t waited_ns, int64_t stopped, int64_t *go_on);

/* What a rank posts at a meeting: the operation, its bytes, where in allocated memory the tensor lies (0: nowhere), and
 * a number that must be the same on all ranks. */
struct shoal_card {
    int64_t what, bytes, place, number;
};

/* The cache lines of a rank: all ranks read the first at every meeting. Cards alternate, since one may be read while
 * the next is written. */
struct shoal_rank {
    _Alignas(128) _Atomic int64_t meetings;
    struct shoal_card cards[2];
    _Alignas(64) _Atomic int32_t asleep, bell;
    _Atomic int64_t stopped;
};

/* The slots of a rank, through which collectives hand over their pieces. */
enum { SHOAL_SLOTS = 3, SHOAL_SLOT_BYTES = 1 << 20 };

/* One process's view of a segment. */
struct shoal_shm {
    struct shoal_rank *ranks;
    char *mail, *slots;
    int64_t rank, size, meetings;
    shoal_look look;
};

/* One attempt to make progress: returns -1 when nothing is left to do, else the rank that is waited for; adds to
 * `moves` the cells or meetings that went through. */
typedef int64_t (*shoal_attempt)(struct shoal_shm *shm, void *job, int64_t *moves);

int64_t shoal_await(struct shoal_shm *shm, shoal_attempt attempt, void *job);
void shoal_ring(struct shoal_rank *rank);
void shoal_reduce(char *const *outs, int64_t num_outs, const char *const *sources, int64_t num_sources, int64_t bytes,
                  int64_t dtype, int64_t op);
int64_t shoal_mail_bytes(int64_t size);
