/* Copies between private memory and shared slots.
 *
 * memcpy is used only for up to a few hundred bytes. For more bytes glibc uses `rep movsb`, which
 * on some processors is several times slower for certain distances between source and destination.
 *
 * For bytes that another CPU reads, the kind of store matters. The other CPU has read the slot's
 * cache lines before, so an ordinary store must first get each line back from that CPU. Between
 * distant cores (350 ns per round trip), an ordinary store was measured to take 29 ns per line, and
 * a non-temporal store 1.9 ns (Zen 4). Between close cores (60 ns per round trip), ordinary stores
 * are faster. A process cannot query which case applies (a virtual machine may migrate while the
 * process runs), so the writer times a sample of its copies. */
#include "internal.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MEMCPY_BYTES 256
#define STEP 256 /* bytes per iteration */
#define SAMPLED 2048 /* bytes of a timed sample; shorter copies always use ordinary stores */
#define COPIES_PER_SAMPLE 32
#ifndef SLOW_NS_PER_LINE
#define SLOW_NS_PER_LINE 8 /* if a sample takes longer, non-temporal stores are used */
#endif

#if defined(__x86_64__)
__attribute__((target("avx"))) static uint64_t copy_steps(unsigned char *to,
                                                          const unsigned char *from, uint64_t bytes)
{
    uint64_t at = 0;
    for (; at + STEP <= bytes; at += STEP) {
        __m256i lane[8];
        for (int i = 0; i < 8; i++)
            lane[i] = _mm256_loadu_si256((const __m256i *)(from + at + 32 * i));
        for (int i = 0; i < 8; i++)
            _mm256_storeu_si256((__m256i *)(to + at + 32 * i), lane[i]);
    }
    return at;
}

__attribute__((target("avx"))) static uint64_t stream_lines(unsigned char *to,
                                                            const unsigned char *from,
                                                            uint64_t bytes)
{
    uint64_t at = 0;
    for (; at + STEP <= bytes; at += STEP) {
        __m256i lane[8];
        for (int i = 0; i < 8; i++)
            lane[i] = _mm256_loadu_si256((const __m256i *)(from + at + 32 * i));
        for (int i = 0; i < 8; i++)
            _mm256_stream_si256((__m256i *)(to + at + 32 * i), lane[i]);
    }
    for (; at + LINE <= bytes; at += LINE) {
        __m256i left = _mm256_loadu_si256((const __m256i *)(from + at));
        __m256i right = _mm256_loadu_si256((const __m256i *)(from + at + 32));
        _mm256_stream_si256((__m256i *)(to + at), left);
        _mm256_stream_si256((__m256i *)(to + at + 32), right);
    }
    return at;
}

void copy_bytes(void *to, const void *from, uint64_t bytes)
{
    uint64_t at = 0;
    if (bytes > MEMCPY_BYTES && __builtin_cpu_supports("avx"))
        at = copy_steps(to, from, bytes);
    memcpy((unsigned char *)to + at, (const unsigned char *)from + at, bytes - at);
}

void stream_bytes(void *to, const void *from, uint64_t bytes)
{
    uint64_t at = -(uintptr_t)to % LINE;
    if (bytes < LINE + at || !__builtin_cpu_supports("avx")) {
        copy_bytes(to, from, bytes);
        return;
    }
    memcpy(to, from, at);
    at += stream_lines((unsigned char *)to + at, (const unsigned char *)from + at, bytes - at);
    memcpy((unsigned char *)to + at, (const unsigned char *)from + at, bytes - at);
}

void stream_fence(void)
{
    _mm_sfence();
}
#else
void copy_bytes(void *to, const void *from, uint64_t bytes)
{
    memcpy(to, from, bytes);
}

void stream_bytes(void *to, const void *from, uint64_t bytes)
{
    memcpy(to, from, bytes);
}

void stream_fence(void)
{
}
#endif

/* Returns whether ordinary stores to these lines are slow. The source is read first, so that only
 * the stores are timed. The sample copies the first SAMPLED bytes to their destination. The caller
 * then copies all bytes. */
static bool stores_are_slow(unsigned char *to, const unsigned char *from)
{
    for (int i = 0; i < SAMPLED; i += LINE)
        (void)*(const volatile unsigned char *)(from + i);
    uint64_t begun = now_ns();
    copy_bytes(to, from, SAMPLED);
    atomic_thread_fence(memory_order_seq_cst); /* waits until the stores are done */
    return now_ns() - begun > SAMPLED / LINE * SLOW_NS_PER_LINE;
}

void copy_to_peer(store_sampler *sampler, void *to, const void *from, uint64_t bytes)
{
    if (bytes < SAMPLED) {
        if (bytes)
            copy_bytes(to, from, bytes);
        return;
    }
    uintptr_t start = (uintptr_t)to, source = (uintptr_t)from;
    /* If source and destination overlap, a sample would overwrite the source. */
    if (start < source + bytes && source < start + bytes) {
        memmove(to, from, bytes);
        return;
    }
    if (sampler->count++ % COPIES_PER_SAMPLE == 0)
        sampler->streaming = stores_are_slow(to, from);
    if (sampler->streaming) {
        stream_bytes(to, from, bytes);
        stream_fence();
    } else
        copy_bytes(to, from, bytes);
}
