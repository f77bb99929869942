/* Waiting for other processes through flags in shared memory: spin, then yield, then sleep on a futex. */
#include "shm.h"
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const int64_t SPINS = 64, LOOK_NS = 100000000, YIELD_NS = 200000;

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wakes `rank` if it sleeps. Call it after the store that the rank may wait for: the fence pairs with the one in
 * shoal_await, so either this call sees the sleeper or the sleeper sees that store. */
void shoal_ring(struct shoal_rank *rank) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&rank->asleep, memory_order_relaxed)) {
        atomic_fetch_add_explicit(&rank->bell, 1, memory_order_release);
        syscall(SYS_futex, &rank->bell, FUTEX_WAKE, INT_MAX, 0, 0, 0);
    }
}

/* Repeats `attempt` until it is done (returns -1) or `look` gives up (returns the rank waited for). It spins first,
 * then yields the core, then sleeps until another rank rings: there may be more ranks than cores. */
int64_t shoal_await(struct shoal_shm *shm, shoal_attempt attempt, void *job) {
    struct shoal_rank *me = &shm->ranks[shm->rank];
    int64_t looks = 0, start = 0, looked = 0, moves = 0, seen = 0, asleep = 0, late;
    for (;;) {
        int32_t bell = atomic_load_explicit(&me->bell, memory_order_acquire);
        if ((late = attempt(shm, job, &moves)) < 0)
            break;
        if (moves != seen) {
            seen = moves, looks = start = 0;
            continue;
        }
        if (++looks < SPINS) {
            rest();
            continue;
        }
        int64_t now = nanoseconds();
        if (start == 0)
            start = looked = now;
        if (now - looked >= LOOK_NS) {
            int64_t go_on = 0, gone = late;
            looked = now;
            shm->look(late, now - start, atomic_load_explicit(&shm->ranks[late].stopped, memory_order_acquire), &go_on);
            if (!go_on) { /* the rank may have come between the attempt and its end */
                if ((late = attempt(shm, job, &moves)) < 0 || late == gone)
                    break;
            }
        }
        if (now - start < YIELD_NS) {
            sched_yield();
        } else if (!asleep) {
            asleep = 1;
            atomic_fetch_add_explicit(&me->asleep, 1, memory_order_relaxed);
            atomic_thread_fence(memory_order_seq_cst);
        } else {
            struct timespec most = {0, looked + LOOK_NS - now};
            syscall(SYS_futex, &me->bell, FUTEX_WAIT, bell, &most, 0, 0);
        }
    }
    if (asleep)
        atomic_fetch_sub_explicit(&me->asleep, 1, memory_order_relaxed);
    return late;
}
