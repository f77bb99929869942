/* Waiting for other processes through flags in shared memory. */
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/* Flags in shared memory: rank r's flag is flags[r * stride], a counter that only grows. What was written before a post is seen
 * after the wait that it ends (release, acquire).
 */
void shoal_post(int64_t *flag, int64_t value) { atomic_store_explicit((_Atomic int64_t *)flag, value, memory_order_release); }

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Returns -1 when all `count` flags have reached `value`, else, after `patience` nanoseconds, the first rank that has not. First it
 * looks again at once, then it gives the core away, then it sleeps: ranks may be more than cores.
 */
int64_t shoal_wait(const int64_t *flags, int64_t stride, int64_t count, int64_t value, int64_t patience) {
    int64_t rank = 0, looks = 0, start = 0;
    for (;;) {
        while (rank < count && atomic_load_explicit((_Atomic int64_t *)(flags + rank * stride), memory_order_acquire) >= value)
            rank++;
        if (rank == count)
            return -1;
        looks++;
        if (looks < 64)
            continue;
        int64_t now = nanoseconds();
        if (start == 0)
            start = now;
        if (now - start > patience)
            return rank;
        if (now - start < 200000) {
            sched_yield();
        } else {
            struct timespec nap = {0, now - start < 5000000 ? 20000 : 500000};
            nanosleep(&nap, 0);
        }
    }
}
