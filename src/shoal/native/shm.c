/* Collectives of the ranks of one host through a segment of shared memory (laid out in segment.c).
 *
 * Ranks go through numbered meetings: each posts the number of the meeting that it has reached, then waits until all
 * have. What is written before a meeting may be read until the reader posts the next one, so the writer may overwrite
 * it once it has passed that next one. Slots rotate: one that is written before meeting m, and in this rank's own
 * share once more before meeting m + 1, is free again at m + 3.
 *
 * Every operation returns 0; or 1 + the rank for which `look` gave up waiting; or -1 - the rank that called another
 * operation, dtype, size, root or number. Bytes, dtypes and operations are trusted: Python checks them.
 *
 * `bases` and `place`: the tensor lies at bases[r] + offset on every rank r, in memory that all ranks have mapped
 * (shm_allocate.py). If all ranks say so at an operation's first meeting, they read each other's tensors in place.
 */
#include "shm.h"
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { SLOT = SHOAL_SLOT_BYTES, SMALL = 32768, LINE = 64, PAST_CACHES = 1 << 24 };
enum { BARRIER, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };
#define OFFSET(place) ((place) & (((int64_t)1 << 40) - 1))
#define OF_OUT ((int64_t)1 << 62)

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The slot of `rank` that belongs to `meeting`. */
static char *slot(const struct shoal_shm *shm, int64_t rank, int64_t meeting) {
    return shm->slots + (rank * SHOAL_SLOTS + meeting % SHOAL_SLOTS) * SLOT;
}

static int64_t all_are_here(struct shoal_shm *shm, void *next, int64_t *moves) {
    int64_t *rank = next;
    (void)moves;
    while (*rank < shm->size &&
           atomic_load_explicit(&shm->ranks[*rank].meetings, memory_order_acquire) >= shm->meetings)
        ++*rank;
    return *rank == shm->size ? -1 : *rank;
}

/* Waits until all ranks have come. Returns 0, or 1 + the first rank that did not come. */
static int64_t meet(struct shoal_shm *shm, const struct shoal_card *card) {
    struct shoal_rank *me = &shm->ranks[shm->rank];
    int64_t next = 0, meeting = ++shm->meetings;
    me->cards[meeting % 2] = *card;
    atomic_store_explicit(&me->meetings, meeting, memory_order_release);
    for (int64_t rank = 0; rank < shm->size; rank++)
        if (rank != shm->rank)
            shoal_ring(&shm->ranks[rank]);
    return 1 + shoal_await(shm, all_are_here, &next);
}

/* Holds the first meeting of an operation. Returns 0 and says in `shared` whether all, none or some of the tensors lie
 * at the same place; else what the operation is to return. */
enum { NONE, SOME, ALL };
static int64_t agree(struct shoal_shm *shm, const struct shoal_card *card, int *shared) {
    int64_t late = meet(shm, card), same = 0, somewhere = 0;
    if (late)
        return late;
    for (int64_t rank = 0; rank < shm->size; rank++) {
        const struct shoal_card *other = &shm->ranks[rank].cards[shm->meetings % 2];
        if (other->what != card->what || other->bytes != card->bytes || other->number != card->number)
            return -1 - rank;
        same += other->place == card->place;
        somewhere += other->place != 0;
    }
    *shared = !somewhere ? NONE : same == shm->size ? ALL : SOME;
    return 0;
}

/* The start of `rank`'s share of `bytes`: even shares, rounded to whole cache lines. */
static int64_t cut(const struct shoal_shm *shm, int64_t bytes, int64_t rank) {
    return rank == shm->size ? bytes : bytes * rank / shm->size / LINE * LINE;
}

static int64_t what(int64_t operation, int64_t dtype, int64_t op, int64_t root) {
    return operation | dtype << 8 | op << 16 | root << 24;
}

/* What a rank hands in at once. `stride`: bytes from one rank's cut to the next, where each rank gets its own. */
struct piece {
    const char *data;
    int64_t bytes, stride;
};
typedef void (*hand_in)(const struct shoal_shm *shm, const struct piece *piece);

/* Hands in the first piece of an operation and meets; copies nothing where all ranks' tensors are shared already. */
static int64_t begin(struct shoal_shm *shm, const struct shoal_card *card, hand_in hand, const struct piece *piece,
                     int *shared) {
    if (!card->place)
        hand(shm, piece);
    int64_t failed = agree(shm, card, shared);
    if (failed || *shared != SOME)
        return failed;
    hand(shm, piece); /* those whose tensor lies at some place have not done it yet */
    return meet(shm, card);
}

static void hand_whole(const struct shoal_shm *shm, const struct piece *piece) {
    memcpy(slot(shm, shm->rank, shm->meetings + 1), piece->data, piece->bytes);
}

/* Hands in all but the share that this rank itself reduces. */
static void hand_shares(const struct shoal_shm *shm, const struct piece *piece) {
    char *mine = slot(shm, shm->rank, shm->meetings + 1);
    int64_t start = cut(shm, piece->bytes, shm->rank), stop = cut(shm, piece->bytes, shm->rank + 1);
    memcpy(mine, piece->data, start);
    memcpy(mine + stop, piece->data + stop, piece->bytes - stop);
}

static int64_t row_bytes(const struct shoal_shm *shm) { return SLOT / shm->size / LINE * LINE; }

static void hand_rows(const struct shoal_shm *shm, const struct piece *piece) {
    char *mine = slot(shm, shm->rank, shm->meetings + 1);
    for (int64_t rank = 0; rank < shm->size; rank++)
        if (rank != shm->rank)
            memcpy(mine + rank * row_bytes(shm), piece->data + rank * piece->stride, piece->bytes);
}

/* Reduces what others have at `start` of their slots of `meeting`, and this rank at `mine`, into every out. */
static void reduce_slots(const struct shoal_shm *shm, char *const *outs, int64_t num_outs, const char *mine,
                         int64_t meeting, int64_t start, int64_t bytes, int64_t dtype, int64_t op) {
    const char *sources[shm->size];
    for (int64_t rank = 0; rank < shm->size; rank++)
        sources[rank] = rank == shm->rank ? mine : slot(shm, rank, meeting) + start;
    shoal_reduce(outs, num_outs, sources, shm->size, bytes, dtype, op);
}

/* Reduces this rank's share of a piece handed in before `meeting`, into the piece and into this rank's slot. */
static void reduce_share(const struct shoal_shm *shm, char *piece, int64_t bytes, int64_t meeting, int64_t dtype,
                         int64_t op) {
    int64_t start = cut(shm, bytes, shm->rank), stop = cut(shm, bytes, shm->rank + 1);
    char *outs[] = {piece + start, slot(shm, shm->rank, meeting) + start};
    reduce_slots(shm, outs, 2, piece + start, meeting, start, stop - start, dtype, op);
}

static void take_shares(const struct shoal_shm *shm, char *piece, int64_t bytes, int64_t meeting) {
    for (int64_t step = 1; step < shm->size; step++) {
        int64_t rank = (shm->rank + step) % shm->size, start = cut(shm, bytes, rank);
        memcpy(piece + start, slot(shm, rank, meeting) + start, cut(shm, bytes, rank + 1) - start);
    }
}

/* Reduces this rank's share of all ranks' tensors, and writes it to all of them. */
static int64_t reduce_in_place(struct shoal_shm *shm, char *const *bases, const struct shoal_card *card, int64_t dtype,
                               int64_t op) {
    int64_t start = cut(shm, card->bytes, shm->rank), stop = cut(shm, card->bytes, shm->rank + 1);
    char *tensors[shm->size];
    for (int64_t rank = 0; rank < shm->size; rank++)
        tensors[rank] = bases[rank] + OFFSET(card->place) + start;
    shoal_reduce(tensors, shm->size, (const char *const *)tensors, shm->size, stop - start, dtype, op);
    return meet(shm, card);
}

/* Takes one meeting instead of two: every rank reduces everything. */
static int64_t reduce_small(struct shoal_shm *shm, char *flat, const struct shoal_card *card, int64_t dtype,
                            int64_t op) {
    int shared;
    hand_whole(shm, &(struct piece){flat, card->bytes, 0});
    int64_t failed = agree(shm, card, &shared);
    if (!failed)
        reduce_slots(shm, &flat, 1, flat, shm->meetings, 0, card->bytes, dtype, op);
    return failed;
}

int64_t shoal_shm_all_reduce(struct shoal_shm *shm, char *flat, int64_t bytes, int64_t dtype, int64_t op,
                             char *const *bases, int64_t place) {
    struct shoal_card card = {what(ALL_REDUCE, dtype, op, 0), bytes, place, 0};
    int shared;
    if (bytes <= SMALL)
        return reduce_small(shm, flat, &card, dtype, op);
    int64_t failed = begin(shm, &card, hand_shares, &(struct piece){flat, least(bytes, SLOT), 0}, &shared);
    if (failed)
        return failed;
    if (shared == ALL)
        return reduce_in_place(shm, bases, &card, dtype, op);
    for (int64_t start = 0; start < bytes; start += SLOT) {
        int64_t meeting = shm->meetings, length = least(bytes - start, SLOT), next = start + SLOT;
        reduce_share(shm, flat + start, length, meeting, dtype, op);
        if (next < bytes)
            hand_shares(shm, &(struct piece){flat + next, least(bytes - next, SLOT), 0});
        if ((failed = meet(shm, &card)))
            return failed;
        take_shares(shm, flat + start, length, meeting);
    }
    return 0;
}

/* `bytes`: the size of `out`, this rank's cut of `flat`. */
int64_t shoal_shm_reduce_scatter(struct shoal_shm *shm, char *out, char *flat, int64_t bytes, int64_t dtype, int64_t op,
                                 char *const *bases, int64_t place) {
    struct shoal_card card = {what(REDUCE_SCATTER, dtype, op, 0), bytes, place, 0};
    int64_t row = row_bytes(shm), mine = shm->rank * bytes;
    int shared;
    int64_t failed = begin(shm, &card, hand_rows, &(struct piece){flat, least(bytes, row), bytes}, &shared);
    if (failed)
        return failed;
    if (shared == ALL) {
        const char *sources[shm->size];
        for (int64_t rank = 0; rank < shm->size; rank++)
            sources[rank] = bases[rank] + OFFSET(place) + mine;
        shoal_reduce(&out, 1, sources, shm->size, bytes, dtype, op);
        return meet(shm, &card);
    }
    for (int64_t start = 0; start < bytes; start += row) {
        int64_t length = least(bytes - start, row);
        if (start) {
            hand_rows(shm, &(struct piece){flat + start, length, bytes});
            if ((failed = meet(shm, &card)))
                return failed;
        }
        reduce_slots(shm, &(char *){out + start}, 1, flat + mine + start, shm->meetings, shm->rank * row, length, dtype,
                     op);
    }
    return 0;
}

/* Copies `bytes`, past the caches where `whole` (all that the operation fills) would not stay in them until it is
 * read: then memory is not read before it is overwritten. */
static void fill(char *to, const char *from, int64_t bytes, int64_t whole) {
#ifdef __SSE2__
    if (whole >= PAST_CACHES) {
        int64_t head = least((LINE - (intptr_t)to % LINE) % LINE, bytes);
        memcpy(to, from, head);
        to += head, from += head, bytes -= head;
        for (; bytes >= LINE; to += LINE, from += LINE, bytes -= LINE)
            for (int64_t at = 0; at < LINE; at += 16)
                _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
        _mm_sfence();
    }
#endif
    (void)whole;
    memcpy(to, from, bytes);
}

/* Copies the other ranks' cuts from where they lie. */
static int64_t gather_in_place(struct shoal_shm *shm, char *out, const char *flat, char *const *bases,
                               const struct shoal_card *card) {
    int64_t bytes = card->bytes, whole = bytes * shm->size;
    for (int64_t step = 1; step < shm->size; step++) {
        int64_t rank = (shm->rank + step) % shm->size;
        const char *from = bases[rank] + OFFSET(card->place) + (card->place & OF_OUT ? rank * bytes : 0);
        fill(out + rank * bytes, from, bytes, whole);
    }
    if (!(card->place & OF_OUT) && out + shm->rank * bytes != flat)
        fill(out + shm->rank * bytes, flat, bytes, whole);
    return meet(shm, card);
}

/* `bytes`: the size of `flat`. `place`: where `out` lies, with OF_OUT, or where `flat` lies. */
int64_t shoal_shm_all_gather(struct shoal_shm *shm, char *out, const char *flat, int64_t bytes, char *const *bases,
                             int64_t place, int64_t number) {
    struct shoal_card card = {what(ALL_GATHER, 0, 0, 0), bytes, place, number};
    char *mine = out + shm->rank * bytes;
    int64_t whole = bytes * shm->size;
    int shared;
    if (place & OF_OUT && mine != flat)
        memmove(mine, flat, bytes); /* where the others look for it */
    int64_t failed = begin(shm, &card, hand_whole, &(struct piece){flat, least(bytes, SLOT), 0}, &shared);
    if (failed)
        return failed;
    if (shared == ALL)
        return gather_in_place(shm, out, flat, bases, &card);
    for (int64_t start = 0; start < bytes; start += SLOT) {
        int64_t length = least(bytes - start, SLOT);
        if (start) {
            hand_whole(shm, &(struct piece){flat + start, length, 0});
            if ((failed = meet(shm, &card)))
                return failed;
        }
        if (mine != flat)
            fill(mine + start, flat + start, length, whole);
        for (int64_t step = 1; step < shm->size; step++) {
            int64_t rank = (shm->rank + step) % shm->size;
            fill(out + rank * bytes + start, slot(shm, rank, shm->meetings), length, whole);
        }
    }
    return 0;
}

int64_t shoal_shm_barrier(struct shoal_shm *shm) {
    int shared;
    return agree(shm, &(struct shoal_card){BARRIER, 0, 0, 0}, &shared);
}

int64_t shoal_shm_broadcast(struct shoal_shm *shm, char *flat, int64_t bytes, int64_t root) {
    struct shoal_card card = {what(BROADCAST, 0, 0, root), bytes, 0, 0};
    int shared;
    for (int64_t start = 0; start < bytes || start == 0; start += SLOT) {
        int64_t length = least(bytes - start, SLOT);
        if (shm->rank == root)
            hand_whole(shm, &(struct piece){flat + start, length, 0});
        int64_t failed = start ? meet(shm, &card) : agree(shm, &card, &shared);
        if (failed)
            return failed;
        if (shm->rank != root)
            fill(flat + start, slot(shm, root, shm->meetings), length, bytes);
    }
    return 0;
}
