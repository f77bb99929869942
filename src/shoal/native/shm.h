/* What the C files of the shared-memory transport say to each other. */
#include <stdatomic.h>
#include <stdint.h>

/* Asked every 0.1 s of waiting: the rank waited for, for how long, and whether that rank said that it stopped. To be set: go on? */
typedef void (*shoal_look)(int64_t late, int64_t waited_ns, int64_t stopped, int64_t *go_on);

/* What a rank says when it comes to a meeting: which operation, on how many bytes, and where in allocated memory (0: nowhere). */
struct shoal_card {
    int64_t what, bytes, place;
};

/* A rank's lines: the first is read by all at every meeting. Cards alternate, since one may be read while the next is written. */
struct shoal_rank {
    _Alignas(128) _Atomic int64_t meetings;
    struct shoal_card cards[2];
    _Alignas(64) _Atomic int32_t asleep, bell;
    _Atomic int64_t stopped;
};

/* One process's view of a segment. */
struct shoal_shm {
    char *base;
    struct shoal_rank *ranks;
    int64_t rank, size, meetings;
    shoal_look look;
};

/* One try to go on: -1 when there is nothing left to do, else the rank that is waited for; counts in `moves` what it achieved. */
typedef int64_t (*shoal_attempt)(struct shoal_shm *shm, void *job, int64_t *moves);

int64_t shoal_await(struct shoal_shm *shm, shoal_attempt attempt, void *job);
void shoal_ring(struct shoal_rank *rank);
void shoal_reduce(char *const *outs, int64_t num_outs, const char *const *sources, int64_t num_sources, int64_t bytes, int64_t dtype,
                  int64_t op);
char *shoal_mail_start(struct shoal_shm *shm);
int64_t shoal_mail_bytes(int64_t size);
