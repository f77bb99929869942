/* Messages from one rank to another: a ring of cells for every ordered pair, so that ranks need no meeting and cannot
 * deadlock in a circle.
 *
 * A message fills one cell after the other, at least one; the head of a cell holds the message's length and tag.
 * Between two ranks messages arrive in the order in which they were sent. Negative tags belong to collectives, which
 * have rings of their own, so that a message which nobody has asked for yet does not block them.
 */
#include "shm.h"
#include <string.h>

enum { KINDS = 2, CELLS = 4, ROOM = 1 << 19, SMALLEST = 4096 };

/* The counters and heads of a pair: what the sender writes, then what the receiver writes. */
struct ring {
    _Alignas(64) _Atomic int64_t sent;
    struct {
        int64_t bytes, tag;
    } heads[CELLS];
    _Alignas(64) _Atomic int64_t taken;
};

/* One message to send or receive; comm/shm.py writes the same fields. `cells`: how many have been moved. */
struct parcel {
    char *data;
    int64_t bytes, peer, tag, sends, cells;
};

struct job {
    struct parcel *parcels;
    int64_t count;
    const struct parcel *wrong;
};

/* Returns the size of a cell: a rank's rings of a kind share ROOM bytes, unless so many peers would make cells tiny. */
static int64_t cell_bytes(int64_t size) {
    int64_t even = ROOM / CELLS / size / SMALLEST * SMALLEST;
    return even > SMALLEST ? even : SMALLEST;
}

int64_t shoal_mail_bytes(int64_t size) {
    return KINDS * size * size * ((int64_t)sizeof(struct ring) + CELLS * cell_bytes(size));
}

/* Moves one cell. Returns 1 if it moved, 0 if none was ready, -1 if it belongs to another message than expected. */
static int move(struct shoal_shm *shm, struct parcel *parcel) {
    int64_t from = parcel->sends ? shm->rank : parcel->peer, to = parcel->sends ? parcel->peer : shm->rank;
    int64_t place = ((parcel->tag < 0) * shm->size + from) * shm->size + to, most = cell_bytes(shm->size);
    struct ring *rings = (struct ring *)shm->mail, *ring = rings + place;
    int64_t sent = atomic_load_explicit(&ring->sent, memory_order_acquire);
    int64_t taken = atomic_load_explicit(&ring->taken, memory_order_acquire);
    int64_t number = (parcel->sends ? sent : taken) % CELLS, done = parcel->cells * most;
    int64_t length = parcel->bytes - done < most ? parcel->bytes - done : most;
    char *cell = (char *)(rings + KINDS * shm->size * shm->size) + (place * CELLS + number) * most;
    if (parcel->sends ? sent - taken == CELLS : sent == taken)
        return 0;
    if (parcel->sends) {
        ring->heads[number].bytes = parcel->bytes, ring->heads[number].tag = parcel->tag;
        memcpy(cell, parcel->data + done, length);
        atomic_store_explicit(&ring->sent, sent + 1, memory_order_release);
    } else {
        if (ring->heads[number].bytes != parcel->bytes || ring->heads[number].tag != parcel->tag) {
            parcel->bytes = ring->heads[number].bytes, parcel->tag = ring->heads[number].tag;
            return -1;
        }
        memcpy(parcel->data + done, cell, length);
        atomic_store_explicit(&ring->taken, taken + 1, memory_order_release);
    }
    parcel->cells++;
    shoal_ring(&shm->ranks[parcel->peer]);
    return 1;
}

static int has_moved(const struct shoal_shm *shm, const struct parcel *parcel) {
    return parcel->cells > 0 && parcel->cells * cell_bytes(shm->size) >= parcel->bytes;
}

/* Moves a cell of every parcel in turn, as long as any can be moved. */
static int64_t move_all(struct shoal_shm *shm, void *data, int64_t *moves) {
    struct job *job = data;
    int64_t before, late;
    do {
        before = *moves, late = -1;
        for (struct parcel *parcel = job->parcels; parcel < job->parcels + job->count; parcel++) {
            int moved = has_moved(shm, parcel) ? 0 : move(shm, parcel);
            if (moved < 0) {
                job->wrong = parcel;
                return -1;
            }
            *moves += moved;
            if (!has_moved(shm, parcel) && late < 0)
                late = parcel->peer;
        }
    } while (*moves != before && late >= 0);
    return late;
}

/* Sends and receives all parcels, no two with the same peer, direction and kind. Returns 0; or 1 + the rank for which
 * `look` gave up waiting; or -1 - the rank whose message was not the expected one: then its parcel says what came. */
int64_t shoal_shm_mail(struct shoal_shm *shm, struct parcel *parcels, int64_t count) {
    struct job job = {parcels, count, 0};
    int64_t late = shoal_await(shm, move_all, &job);
    return job.wrong ? -1 - job.wrong->peer : 1 + late;
}

/* Returns whether the next message of rank `from` has come and has this tag. Sets `stopped` to why that rank stopped,
 * or 0. */
int64_t shoal_shm_has_come(struct shoal_shm *shm, int64_t from, int64_t tag, int64_t *stopped) {
    struct ring *ring = (struct ring *)shm->mail + ((tag < 0) * shm->size + from) * shm->size + shm->rank;
    /* loaded before the counters, since the rank may have sent, then stopped */
    *stopped = atomic_load_explicit(&shm->ranks[from].stopped, memory_order_acquire);
    int64_t sent = atomic_load_explicit(&ring->sent, memory_order_acquire);
    int64_t taken = atomic_load_explicit(&ring->taken, memory_order_acquire);
    return sent != taken && ring->heads[taken % CELLS].tag == tag;
}
