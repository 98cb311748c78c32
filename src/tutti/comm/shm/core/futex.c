/* Waiting: spin, then yield, then sleep on a futex.
 *
 * If there is a CPU for each rank, the peer is running, and a spinning waiter sees the peer's
 * answer soonest. If there are more ranks than CPUs, the peer may need the CPU on which the waiter
 * spins, so the waiter yields early. The relevant number of CPUs is not the number that is online
 * but the number that the ranks may use. This is the size of the union of their affinity masks (if
 * each rank is pinned to its own CPU, there are as many CPUs as ranks), limited by the CPU quota of
 * the control group, which containers set. */
#define _GNU_SOURCE /* CPU_ALLOC, sched_getaffinity, syscall */
#include "internal.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FIRST_SLEEP_NS 20000
#define LONGEST_SLEEP_NS 1000000
#define ALIVE_CHECK_NS 20000000
#define LONGEST_FUTEX_NS 20000000 /* then check again, because a killed process wakes no waiter */
#define YIELDS_PER_CHECK 32
#define MASK_CPUS 8192

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

static atomic_int usable_cpus; /* 0: not counted yet */

static int count_cpus(const int64_t *pids, int n)
{
    enum { WORD = 8 * sizeof(unsigned long), WORDS = MASK_CPUS / WORD };
    unsigned long all[WORDS] = {0}, one[WORDS];
    int count = 0;
    for (int i = 0; i < n; i++) {
        /* The raw system call returns the number of bytes of the mask that the kernel has
         * written. */
        long bytes = syscall(SYS_sched_getaffinity, (pid_t)pids[i], sizeof one, one);
        for (long w = 0; w < bytes / (long)sizeof *one; w++)
            all[w] |= one[w];
    }
    for (int w = 0; w < WORDS; w++)
        count += __builtin_popcountl(all[w]);
    if (count == 0)
        count = (int)sysconf(_SC_NPROCESSORS_ONLN);
    double quota = cgroup_cpu_quota();
    if (quota < count)
        count = quota < 1 ? 1 : (int)quota;
    return count < 1 ? 1 : count;
}

/* Keeps the largest count over all calls, because a process may have groups of different sizes, and
 * a one-sided wait does not know for which processes it waits. */
void count_cpus_of(const int64_t *pids, int n)
{
    int count = count_cpus(pids, n), known = atomic_load_explicit(&usable_cpus, memory_order_relaxed);
    while (count > known && !atomic_compare_exchange_weak(&usable_cpus, &known, count))
        ;
}

spin_limits spin_limits_for(int ranks)
{
    int cpus = atomic_load_explicit(&usable_cpus, memory_order_relaxed);
    if (cpus == 0) {
        count_cpus_of(&(int64_t){0}, 1); /* pid 0: the calling thread */
        cpus = atomic_load_explicit(&usable_cpus, memory_order_relaxed);
    }
    return cpus >= ranks ? (spin_limits){200, 1000} : (spin_limits){20, 1000};
}

spin_limits worker_spin_limits(void)
{
    return (spin_limits){200, 0};
}

static inline void relax_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* "yield" is a no-op on most ARM CPUs */
#endif
}

bool pause_awake(pause_state *pause, bool *should_check)
{
    uint32_t turn = pause->turns;
    *should_check = false;
    if (turn < pause->limit.spins)
        relax_cpu();
    else if (turn < pause->limit.spins + pause->limit.yields) {
        sched_yield();
        *should_check = turn % YIELDS_PER_CHECK == 0;
    } else
        return false;
    pause->turns++;
    return true;
}

bool pause_once(pause_state *pause)
{
    bool should_check;
    if (pause_awake(pause, &should_check))
        return should_check;
    pause->sleep_ns = pause->sleep_ns ? pause->sleep_ns + pause->sleep_ns / 4 : FIRST_SLEEP_NS;
    if (pause->sleep_ns > LONGEST_SLEEP_NS)
        pause->sleep_ns = LONGEST_SLEEP_NS;
    struct timespec time = {0, (long)pause->sleep_ns};
    nanosleep(&time, NULL);
    return true;
}

void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    struct timespec time = {0, LONGEST_FUTEX_NS};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, NULL, 0);
}

/* The increment is a release, so a waiter that reads the new value (acquire) sees the change for
 * which it was woken. A waiter that read the old value is either woken, or is not put to sleep by
 * the kernel. */
void futex_wake_all(_Atomic uint32_t *word)
{
    atomic_fetch_add_explicit(word, 1, memory_order_release);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

bool alive_check_due(pause_state *pause, uint64_t now)
{
    if (pause->alive_checked_ns == 0)
        pause->alive_checked_ns = now; /* the first check comes after one interval of waiting */
    if (now - pause->alive_checked_ns < ALIVE_CHECK_NS)
        return false;
    pause->alive_checked_ns = now;
    return true;
}
