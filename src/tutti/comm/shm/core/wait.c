/* Waiting: spin, then yield, then sleep. */
#define _GNU_SOURCE /* syscall */
#include "internal.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FIRST_SLEEP_NS 20000
#define LONGEST_SLEEP_NS 1000000
#define LIFE_CHECK_NS 20000000
#define LONGEST_WAIT_NS 20000000 /* a rank that dies does not ring */
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

patience patience_of_worker(void)
{
    return (patience){200, 0};
}

static inline void relax_core(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* "yield" is a no-op on most cores */
#endif
}

bool pause_awake(pause_state *pause, bool *should_look)
{
    uint32_t turn = pause->turns;
    *should_look = false;
    if (turn < pause->limit.spins)
        relax_core();
    else if (turn < pause->limit.spins + pause->limit.yields) {
        sched_yield();
        *should_look = turn % YIELDS_PER_CHECK == 0;
    } else
        return false;
    pause->turns++;
    return true;
}

bool pause_once(pause_state *pause)
{
    bool should_look;
    if (pause_awake(pause, &should_look))
        return should_look;
    pause->sleep_ns = pause->sleep_ns ? pause->sleep_ns + pause->sleep_ns / 4 : FIRST_SLEEP_NS;
    if (pause->sleep_ns > LONGEST_SLEEP_NS)
        pause->sleep_ns = LONGEST_SLEEP_NS;
    struct timespec time = {0, (long)pause->sleep_ns};
    nanosleep(&time, NULL);
    return true;
}

void sleep_on_bell(_Atomic uint32_t *bell, uint32_t heard)
{
    struct timespec time = {0, LONGEST_WAIT_NS};
    syscall(SYS_futex, bell, FUTEX_WAIT, heard, &time, NULL, 0);
}

void ring_bell(_Atomic uint32_t *bell)
{
    atomic_fetch_add_explicit(bell, 1, memory_order_relaxed);
    syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
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
