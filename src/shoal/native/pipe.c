/* A stream of bytes each way between two processes, through rings of shared memory: what sessions of a server go over
 * (server/sessions/memory.py).
 *
 *     a page            each end's lines (shm.h), and the counters of both directions
 *     two rings         the bytes of end 0, those of end 1
 *
 * A message is a head, its body, and the bytes of tensors, one behind the other: a small one is one copy, one store and
 * at most one wake-up. Counters only grow; the bytes between them are the reader's. Who waits spins, yields, then
 * sleeps (flags.c), and fails at once where an end has left.
 */
#include "shm.h"
#include <string.h>

enum { PAGE = 4096, RING = 1 << 19, STEP = 1 << 16, PIPE_ENDS = 2 };
enum { MOVED = 0, LATE = -1, GONE = -2, BROKEN = -3, PARTLY = -16 };

/* Bytes that an end has written, and that the other one has taken. */
struct flow {
    _Alignas(128) _Atomic int64_t written;
    _Alignas(128) _Atomic int64_t taken;
};

/* Bytes of this process, to be sent or filled; server/sessions/memory.py writes the same fields. */
struct span {
    char *data;
    int64_t bytes;
};

/* Spans under way, none of no bytes, and those that come behind them. */
struct passage {
    struct span *spans;
    int64_t count;
    struct span *behind;
    int64_t behind_count, done, sends, outcome;
};

int64_t shoal_pipe_bytes(void) { return PAGE + PIPE_ENDS * (int64_t)RING; }

/* Prepares `view` (shoal_shm_view_bytes() of memory) of end `rank`, which every call then takes. */
void shoal_pipe_open(struct shoal_shm *view, char *base, int64_t rank, shoal_look look) {
    *view = (struct shoal_shm){(struct shoal_rank *)base, base + PAGE, 0, rank, PIPE_ENDS, 0, look};
}

static struct flow *flow_of(const struct shoal_shm *pipe, int64_t end) {
    return (struct flow *)(pipe->ranks + PIPE_ENDS) + end;
}

static int has_left(const struct shoal_shm *pipe, int64_t end) {
    return atomic_load_explicit(&pipe->ranks[end].stopped, memory_order_acquire) != 0;
}

/* Ends the pipe, from any thread of either process: whoever waits fails. */
void shoal_pipe_end(struct shoal_shm *pipe) {
    atomic_store_explicit(&pipe->ranks[pipe->rank].stopped, 1, memory_order_release);
    for (int64_t end = 0; end < PIPE_ENDS; end++)
        shoal_ring(&pipe->ranks[end]);
}

/* Copies what can be copied at once between the spans and a ring, of which `free` bytes from `place` on may be used.
 * Returns how many bytes. */
static int64_t copy(struct passage *job, char *ring, int64_t place, int64_t free) {
    int64_t copied = 0;
    while (job->count && copied < free) {
        int64_t at = (place + copied) % RING, bytes = job->spans->bytes - job->done;
        bytes = bytes < free - copied ? bytes : free - copied;
        bytes = bytes < RING - at ? bytes : RING - at;
        char *mine = job->spans->data + job->done;
        memcpy(job->sends ? ring + at : mine, job->sends ? mine : ring + at, bytes);
        copied += bytes, job->done += bytes;
        if (job->done == job->spans->bytes)
            job->spans++, job->count--, job->done = 0;
        if (!job->count)
            job->spans = job->behind, job->count = job->behind_count, job->behind_count = 0;
    }
    return copied;
}

/* Moves bytes as long as it can: an attempt of shoal_await. What an end has written before it left is still read. */
static int64_t pass(struct shoal_shm *pipe, void *data, int64_t *moves) {
    struct passage *job = data;
    int64_t peer = 1 - pipe->rank, from = job->sends ? pipe->rank : peer;
    struct flow *flow = flow_of(pipe, from);
    for (;;) {
        int left = has_left(pipe, peer);
        int64_t written = atomic_load_explicit(&flow->written, memory_order_acquire);
        int64_t taken = atomic_load_explicit(&flow->taken, memory_order_acquire), full = written - taken;
        if (!job->count)
            return -1;
        if (has_left(pipe, pipe->rank) || (left && (job->sends || !full)) || full < 0 || full > RING) {
            job->outcome = full < 0 || full > RING ? BROKEN : GONE;
            return -1;
        }
        int64_t most = job->sends ? RING - full : full;
        if (!most)
            return peer;
        int64_t place = job->sends ? written : taken;
        int64_t moved = copy(job, pipe->mail + from * RING, place, most < STEP ? most : STEP);
        atomic_store_explicit(job->sends ? &flow->written : &flow->taken, place + moved, memory_order_release);
        shoal_ring(&pipe->ranks[peer]);
        ++*moves;
    }
}

static int64_t passed(struct shoal_shm *pipe, struct passage job) {
    return shoal_await(pipe, pass, &job) >= 0 ? LATE : job.outcome;
}

/* Sends a message: a body, and the bytes of `count` spans. Returns MOVED, LATE where `look` gave up waiting for room,
 * GONE where an end has left. */
int64_t shoal_pipe_send(struct shoal_shm *pipe, char *body, int64_t bytes, struct span *spans, int64_t count) {
    struct span first[2] = {{(char *)&bytes, sizeof bytes}, {body, bytes}};
    return passed(pipe, (struct passage){first, bytes ? 2 : 1, spans, count, 0, 1, MOVED});
}

/* Fills `count` spans with the next bytes. Returns as shoal_pipe_send. */
int64_t shoal_pipe_fill(struct shoal_shm *pipe, struct span *spans, int64_t count) {
    return passed(pipe, (struct passage){spans, count, 0, 0, 0, 0, MOVED});
}

/* Waits for the next message and reads its body into `body`, of `room` bytes. Returns its length; PARTLY - length where
 * only the head is there (the body is to be filled then), or is longer than `room`; else as shoal_pipe_send. */
int64_t shoal_pipe_take(struct shoal_shm *pipe, char *body, int64_t room) {
    int64_t bytes = 0, outcome = shoal_pipe_fill(pipe, &(struct span){(char *)&bytes, sizeof bytes}, 1);
    if (outcome != MOVED)
        return outcome;
    if (bytes < 0 || bytes > RING)
        return BROKEN;
    struct flow *flow = flow_of(pipe, 1 - pipe->rank);
    int64_t here = atomic_load_explicit(&flow->written, memory_order_acquire) - flow->taken;
    if (bytes > room || bytes > here)
        return PARTLY - bytes;
    outcome = bytes ? shoal_pipe_fill(pipe, &(struct span){body, bytes}, 1) : MOVED;
    return outcome == MOVED ? bytes : outcome;
}
