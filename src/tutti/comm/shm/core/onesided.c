/* One-sided memory: puts, signals and atomics on 64-bit words anywhere in a mapped segment.
 *
 * A signal is stored with release and awaited with acquire, so a rank that has read the new value
 * of a signal also reads the bytes that were put before the signal. Read-modify-write operations
 * are sequentially consistent. */
#include "internal.h"
#include "structures.h"

#include <inttypes.h>

static _Atomic uint64_t *word(const uint64_t *address)
{
    return (_Atomic uint64_t *)(uintptr_t)address;
}

static _Thread_local store_sampler puts;

TUTTI_API void tutti_put(void *to, const void *from, uint64_t bytes)
{
    copy_to_peer(&puts, to, from, bytes);
}

TUTTI_API void tutti_put_signal(void *to, const void *from, uint64_t bytes, uint64_t *signal,
                                uint64_t value, int add)
{
    copy_to_peer(&puts, to, from, bytes);
    if (add)
        atomic_fetch_add_explicit(word(signal), value, memory_order_acq_rel);
    else
        atomic_store_explicit(word(signal), value, memory_order_release);
}

TUTTI_API int tutti_wait_signal(const uint64_t *signal, uint64_t value, double timeout_s,
                                const tutti_segment *watched)
{
    uint64_t seen = atomic_load_explicit(word(signal), memory_order_acquire);
    if (seen >= value)
        return 0;
    pause_state pause = {.limit = spin_limits_for(2)};
    uint64_t deadline = deadline_after(timeout_s);
    while ((seen = atomic_load_explicit(word(signal), memory_order_acquire)) < value) {
        if (!pause_once(&pause))
            continue;
        uint64_t now = now_ns();
        if (watched && alive_check_due(&pause, now) && !tutti_segment_owner_lives(watched) &&
            atomic_load_explicit(word(signal), memory_order_acquire) < value)
            return fail(TUTTI_PEER_DIED,
                        "the process that should set a signal to %" PRIu64
                        " has died. The value of the signal is %" PRIu64 ".",
                        value, seen);
        if (now >= deadline)
            return fail(TUTTI_TIMEOUT,
                        "a signal should reach %" PRIu64 " but is at %" PRIu64 " after %.1f s",
                        value, seen, timeout_s);
    }
    return 0;
}

/* Waits and loads in one call, because calls from Python are slow. */
TUTTI_API uint64_t tutti_await_word(const uint64_t *address, uint64_t at_least, double timeout_s)
{
    tutti_wait_signal(address, at_least, timeout_s, NULL);
    return tutti_load(address);
}

TUTTI_API uint64_t tutti_load(const uint64_t *address)
{
    return atomic_load_explicit(word(address), memory_order_acquire);
}

TUTTI_API void tutti_store(uint64_t *address, uint64_t value)
{
    atomic_store_explicit(word(address), value, memory_order_release);
}

TUTTI_API uint64_t tutti_fetch_add(uint64_t *address, uint64_t value)
{
    return atomic_fetch_add(word(address), value);
}

TUTTI_API uint64_t tutti_compare_swap(uint64_t *address, uint64_t expected, uint64_t desired)
{
    atomic_compare_exchange_strong(word(address), &expected, desired);
    return expected;
}

TUTTI_API double tutti_round_trip_ns(uint64_t *line, int first, uint32_t turns, double timeout_s)
{
    uint64_t deadline = deadline_after(timeout_s), begun = 0;
    for (uint64_t turn = 0; turn <= turns; turn++) {
        uint64_t own = 2 * turn + (first ? 1 : 2), other = first ? own + 1 : own - 1;
        if (first)
            atomic_store_explicit(word(line), own, memory_order_release);
        for (uint32_t looks = 1; atomic_load_explicit(word(line), memory_order_acquire) < other;
             looks++)
            if (looks % 4096 == 0 && now_ns() >= deadline)
                return -1;
        if (!first)
            atomic_store_explicit(word(line), own, memory_order_release);
        if (turn == 0) /* both ranks have arrived: start the clock */
            begun = now_ns();
    }
    return (double)(now_ns() - begun) / turns;
}

TUTTI_API void tutti_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}
