/* The segment of shared memory that the ranks of one host map: its layout, and one process's view of it.
 *
 *     a page or more    each rank's lines (shm.h)
 *     mail              the rings of messages (mail.c)
 *     slots             SHOAL_SLOTS a rank, for collectives (shm.c)
 */
#include "shm.h"

enum { PAGE = 4096 };

static int64_t pages(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
static int64_t head_bytes(int64_t size) { return pages(size * (int64_t)sizeof(struct shoal_rank)); }

int64_t shoal_shm_bytes(int64_t size) {
    return head_bytes(size) + pages(shoal_mail_bytes(size)) + size * SHOAL_SLOTS * SHOAL_SLOT_BYTES;
}

int64_t shoal_shm_view_bytes(void) { return sizeof(struct shoal_shm); }

/* Prepares `view` (shoal_shm_view_bytes() of memory), which every operation then takes. */
void shoal_shm_open(struct shoal_shm *view, char *base, int64_t rank, int64_t size, shoal_look look) {
    char *mail = base + head_bytes(size), *slots = mail + pages(shoal_mail_bytes(size));
    *view = (struct shoal_shm){(struct shoal_rank *)base, mail, slots, rank, size, 0, look};
}

/* The number on the card of `rank` at the meeting that this one has been at last. It stays there until this rank has
 * been at another. */
int64_t shoal_shm_number_of(const struct shoal_shm *shm, int64_t rank) {
    return shm->ranks[rank].cards[shm->meetings % 2].number;
}

/* Tells those who wait for this rank that it will not come: `reason` is any number but 0. */
void shoal_shm_stop(struct shoal_shm *shm, int64_t reason) {
    atomic_store_explicit(&shm->ranks[shm->rank].stopped, reason, memory_order_release);
}
