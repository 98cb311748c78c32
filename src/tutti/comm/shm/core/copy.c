/* Copying between private memory and slots.
 *
 * Not by memcpy beyond a few hundred bytes: glibc then uses `rep movsb`, which on some processors
 * is several times slower for certain distances between source and destination.
 *
 * Bytes for another core are the delicate ones. That core has read the slot's lines before, so each
 * ordinary store must first take its line back; between cores far apart (350 ns there and back) that
 * was measured as 29 ns a line (Zen 4), and 1.9 ns for stores that go past the caches. But between
 * near ones (60 ns) ordinary stores are the faster ones, by half. A writer cannot ask which it
 * is (a virtual machine may move while it runs), so it measures now and then. */
#include "internal.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PLAIN_BYTES 256
#define STEP 256 /* bytes per turn of the loops */
#define SAMPLED 2048 /* bytes; less than that is never worth the question */
#define HANDED_PER_SAMPLE 32
#ifndef DEAR_NS_PER_LINE
#define DEAR_NS_PER_LINE 8
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
    if (bytes > PLAIN_BYTES && __builtin_cpu_supports("avx"))
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

void streams_end(void)
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

void streams_end(void)
{
}
#endif

/* How long it takes to own some lines again. The source is read before, so that only the writing
 * counts, and the right bytes are written, so that a reader who looks meanwhile sees no others. */
static bool lines_are_dear(unsigned char *to, const unsigned char *from)
{
    for (int i = 0; i < SAMPLED; i += LINE)
        (void)*(const volatile unsigned char *)(from + i);
    uint64_t begun = now_ns();
    copy_bytes(to, from, SAMPLED);
    atomic_thread_fence(memory_order_seq_cst); /* waits for the stores */
    return now_ns() - begun > SAMPLED / LINE * DEAR_NS_PER_LINE;
}

void hand_over(crossing *crossing, void *to, const void *from, uint64_t bytes)
{
    if (bytes < SAMPLED) {
        if (bytes)
            copy_bytes(to, from, bytes);
        return;
    }
    uintptr_t start = (uintptr_t)to, source = (uintptr_t)from;
    if (start < source + bytes && source < start + bytes) { /* a sample would destroy the source */
        memmove(to, from, bytes);
        return;
    }
    if (crossing->count++ % HANDED_PER_SAMPLE == 0)
        crossing->dear = lines_are_dear(to, from);
    if (crossing->dear) {
        stream_bytes(to, from, bytes);
        streams_end();
    } else
        copy_bytes(to, from, bytes);
}
