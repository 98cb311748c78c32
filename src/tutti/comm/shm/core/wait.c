/* Waiting: spin, then yield, then sleep. */
#include "internal.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#define FIRST_SLEEP_NS 20000
#define LONGEST_SLEEP_NS 1000000
#define LIFE_CHECK_NS 20000000
#define YIELDS_PER_CHECK 32

uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

uint64_t deadline_after(double seconds)
{
    if (!(seconds > 0) || seconds > 1e9)
        return FOREVER;
    return now_ns() + (uint64_t)(seconds * 1e9);
}

/* With a core for each rank the peer is running now, and burning this core brings its answer
 * soonest; when ranks outnumber cores the peer may be waiting for this very core. */
patience patience_for(int ranks)
{
    static atomic_long known; /* asking reads a file */
    long cores = atomic_load_explicit(&known, memory_order_relaxed);
    if (cores <= 0) {
        cores = sysconf(_SC_NPROCESSORS_ONLN);
        atomic_store_explicit(&known, cores, memory_order_relaxed);
    }
    return cores >= ranks ? (patience){200, 1000} : (patience){20, 1000};
}

static inline void relax_core(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* "yield" is a no-op on most cores */
#endif
}

bool pause_once(pause_state *pause)
{
    uint32_t turn = pause->turns++;
    if (turn < pause->limit.spins) {
        relax_core();
        return false;
    }
    if (turn < pause->limit.spins + pause->limit.yields) {
        sched_yield();
        return turn % YIELDS_PER_CHECK == 0;
    }
    pause->turns = turn; /* stays asleep, and never wraps */
    pause->sleep_ns = pause->sleep_ns ? pause->sleep_ns + pause->sleep_ns / 4 : FIRST_SLEEP_NS;
    if (pause->sleep_ns > LONGEST_SLEEP_NS)
        pause->sleep_ns = LONGEST_SLEEP_NS;
    struct timespec time = {0, (long)pause->sleep_ns};
    nanosleep(&time, NULL);
    return true;
}

bool life_check_is_due(pause_state *pause, uint64_t now)
{
    if (pause->life_checked_ns == 0)
        pause->life_checked_ns = now; /* a peer that just was late is not yet a suspect */
    if (now - pause->life_checked_ns < LIFE_CHECK_NS)
        return false;
    pause->life_checked_ns = now;
    return true;
}
