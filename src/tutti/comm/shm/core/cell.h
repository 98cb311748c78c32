/* A cell: a value with a version, written by one process at a time and read by any without waiting.
 *
 *     state (8 bytes): version << 16 | absent << 15 | rank of the writer + 1, or 0 when none
 *     payload, twice: version v is in copy v & 1
 *
 * A writer claims the state by compare-and-swap, writes version v + 1 into the copy that readers of
 * version v do not look at, and publishes it. So a reader needs no lock, is sent back only when two
 * publications overtook it, and a writer that is killed half way leaves version v as it was; the
 * next writer takes the dead one's claim over.
 *
 * Why no reader returns a mixture, in C11's terms:
 *  1. The publication is a release store of (v, no writer); claims are read-modify-writes and so
 *     continue its release sequence. A reader's acquire load of any state with version v therefore
 *     sees all of version v's payload.
 *  2. Copy v & 1 is next written by the writer of v + 2. It first moves the state to (v + 1, writer),
 *     then executes a release fence, then stores words. If a reader's copy holds any such word, its
 *     acquire fence after the copy synchronises with that release fence, so that its second load of
 *     the state sees (v + 1, writer) or later, and it tries again.
 *  3. Words are 8-byte relaxed atomics: no word is torn, and there is no data race to be undefined.
 *  4. A claim acquires what the previous writer published, so adding to a value loses nothing. */
#ifndef TUTTI_CELL_H
#define TUTTI_CELL_H

#include <stdint.h>
#include <string.h>

#include "structures.h"

#define CELL_WRITER 0x7fffull
#define CELL_ABSENT 0x8000ull
enum { CELL_READ_TRIES = 64, CELL_CLAIM_TRIES = 256 };

static inline void cell_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline uint64_t cell_version(uint64_t state) { return state >> TUTTI_VERSION_SHIFT; }

static inline uint64_t words_of(uint64_t bytes) { return (bytes + 7) / 8; }

/* Out of shared memory: `from` is aligned to 8 and padded to whole words, `to` need not be. */
static inline void words_load(void *to, const uint64_t *from, uint64_t bytes) {
    char *out = to;
    uint64_t whole = bytes / 8;
    for (uint64_t i = 0; i < whole; ++i) {
        uint64_t word = __atomic_load_n(from + i, __ATOMIC_RELAXED);
        memcpy(out + 8 * i, &word, 8);
    }
    if (bytes % 8) {
        uint64_t word = __atomic_load_n(from + whole, __ATOMIC_RELAXED);
        memcpy(out + 8 * whole, &word, bytes % 8);
    }
}

/* One word of private memory, zeros behind its end. */
static inline uint64_t word_at(const void *from, uint64_t word, uint64_t bytes) {
    uint64_t value = 0, begin = word * 8;
    if (begin + 8 <= bytes)
        memcpy(&value, (const char *)from + begin, 8);
    else
        memcpy(&value, (const char *)from + begin, bytes - begin);
    return value;
}

/* Into shared memory: `to` is aligned to 8 and padded to whole words. */
static inline void words_store(uint64_t *to, const void *from, uint64_t bytes) {
    const char *in = from;
    uint64_t whole = bytes / 8;
    for (uint64_t i = 0; i < whole; ++i) {
        uint64_t word;
        memcpy(&word, in + 8 * i, 8);
        __atomic_store_n(to + i, word, __ATOMIC_RELAXED);
    }
    if (bytes % 8)
        __atomic_store_n(to + whole, word_at(from, whole, bytes), __ATOMIC_RELAXED);
}

/* 1 and the version; 0 when there is none (`*version` is 0, or that of the deletion). */
static inline int cell_read(const uint64_t *state, const uint64_t *payload, uint64_t bytes,
                            void *out, uint64_t *version, uint64_t *retries) {
    for (int attempt = 0; attempt < CELL_READ_TRIES; ++attempt) {
        uint64_t before = __atomic_load_n(state, __ATOMIC_ACQUIRE);
        uint64_t found = cell_version(before);
        *version = found;
        if (found == 0 || (before & CELL_ABSENT))
            return 0;
        words_load(out, payload + (found & 1) * words_of(bytes), bytes);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        uint64_t after = __atomic_load_n(state, __ATOMIC_RELAXED);
        uint64_t now = cell_version(after);
        if (now == found || (now == found + 1 && !(after & CELL_WRITER)))
            return 1;
        __atomic_fetch_add(retries, 1, __ATOMIC_RELAXED);
    }
    return TUTTI_OVERTAKEN;
}

/* 0 and the state that was claimed, or TUTTI_BUSY - rank of the writer that holds it. */
static inline int cell_claim(uint64_t *state, uint32_t rank, const uint8_t *dead, uint64_t *claimed) {
    *claimed = 0;
    uint64_t seen = __atomic_load_n(state, __ATOMIC_RELAXED);
    for (int attempt = 0; attempt < CELL_CLAIM_TRIES; ++attempt) {
        uint64_t writer = seen & CELL_WRITER;
        if (writer == 0 || __atomic_load_n(dead + writer - 1, __ATOMIC_RELAXED)) {
            uint64_t ours = (seen & ~CELL_WRITER) | (rank + 1);
            if (__atomic_compare_exchange_n(state, &seen, ours, 0, __ATOMIC_ACQUIRE,
                                            __ATOMIC_RELAXED)) {
                __atomic_thread_fence(__ATOMIC_RELEASE);
                *claimed = ours;
                return 0;
            }
        } else {
            cell_pause();
            seen = __atomic_load_n(state, __ATOMIC_RELAXED);
        }
    }
    uint64_t writer = seen & CELL_WRITER;
    return TUTTI_BUSY - (writer ? (int)writer - 1 : (int)rank);
}

/* Publishes what was written into cell_next(); returns its version. */
static inline uint64_t cell_publish(uint64_t *state, uint64_t claimed, int present) {
    uint64_t version = cell_version(claimed) + 1;
    uint64_t next = version << TUTTI_VERSION_SHIFT | (present ? 0 : CELL_ABSENT);
    __atomic_store_n(state, next, __ATOMIC_RELEASE);
    return version;
}

static inline uint64_t *cell_now(uint64_t *payload, uint64_t claimed, uint64_t bytes) {
    return payload + (cell_version(claimed) & 1) * words_of(bytes);
}

static inline uint64_t *cell_next(uint64_t *payload, uint64_t claimed, uint64_t bytes) {
    return payload + ((cell_version(claimed) + 1) & 1) * words_of(bytes);
}

#endif
