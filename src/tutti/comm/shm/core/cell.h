/* A cell: a value with a version, written by one process at a time and read by any process without
 * waiting.
 *
 *     state (8 bytes): version << 16 | absent << 15 | rank of the writer + 1, or 0 if there is none
 *     payload, twice: version v is in copy v & 1
 *
 * A writer claims the state by compare-and-swap and writes version v + 1 into the copy that readers
 * of version v do not use. It publishes version v + 1 by a second compare-and-swap, which expects
 * the claimed state. So a reader of version v needs no lock. The reader retries only if version
 * v + 1 was published and the writer of version v + 2 has claimed the state before the reader
 * finished its copy. A writer that is killed during a write leaves version v intact, and the next
 * writer takes over the dead writer's claim.
 *
 * Only a process that has died may lose its claim (tutti_*_declare_dead), because a live writer
 * might still be storing words into the copy that the new owner of the claim writes. If a live
 * process is nevertheless declared dead, the second compare-and-swap limits the damage: it fails
 * for a writer that has lost its claim. So this writer cannot replace a newer version with an older
 * one, and starts again. tests/structures/test_structures_model.py checks both rules.
 *
 * Why no reader returns a mixture of two versions, in terms of C11:
 *  1. Publication is a read-modify-write with release from (v - 1, writer) to (v, none). Later
 *     claims are read-modify-writes and continue its release sequence. So a reader's acquire load
 *     of any state with version v sees all of version v's payload.
 *  2. Copy v & 1 is next written by the writer of v + 2. That writer first moves the state to
 *     (v + 1, writer), then executes a release fence, then stores words. If a reader's copy
 *     contains such a word, the reader's acquire fence after the copy synchronizes with that
 *     release fence. So the reader's second load of the state sees (v + 1, writer) or later, and
 *     the reader retries.
 *  3. Words are relaxed 8-byte atomics: no word is torn, and there is no data race.
 *  4. A claim acquires what the previous writer published, so no addition is lost. */
#ifndef TUTTI_CELL_H
#define TUTTI_CELL_H

#include <stdint.h>
#include <string.h>

#include "structures.h"
#include "tutti_shm.h"

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

/* ---- Words of shared memory ---- */

static inline uint64_t words_of(uint64_t bytes) { return (bytes + 7) / 8; }

/* Loads from shared memory. `from` must be aligned to 8 bytes and padded to whole words. `to` may
 * have any alignment. */
static inline void words_load(void *to, const uint64_t *from, uint64_t bytes) {
    char *out = to;
    uint64_t whole = bytes / 8;
#pragma GCC unroll 8
    for (uint64_t i = 0; i < whole; ++i) {
        uint64_t word = __atomic_load_n(from + i, __ATOMIC_RELAXED);
        memcpy(out + 8 * i, &word, 8);
    }
    if (bytes % 8) {
        uint64_t word = __atomic_load_n(from + whole, __ATOMIC_RELAXED);
        memcpy(out + 8 * whole, &word, bytes % 8);
    }
}

/* Returns one word of private memory. Bytes after the end of the memory are zeros. */
static inline uint64_t word_at(const void *from, uint64_t word, uint64_t bytes) {
    uint64_t value = 0, begin = word * 8;
    memcpy(&value, (const char *)from + begin, begin + 8 <= bytes ? 8 : bytes - begin);
    return value;
}

/* Stores into shared memory. `to` must be aligned to 8 bytes and padded to whole words. */
static inline void words_store(uint64_t *to, const void *from, uint64_t bytes) {
    const char *in = from;
    uint64_t whole = bytes / 8;
#pragma GCC unroll 8
    for (uint64_t i = 0; i < whole; ++i) {
        uint64_t word;
        memcpy(&word, in + 8 * i, 8);
        __atomic_store_n(to + i, word, __ATOMIC_RELAXED);
    }
    if (bytes % 8)
        __atomic_store_n(to + whole, word_at(from, whole, bytes), __ATOMIC_RELAXED);
}

/* ---- Adding numbers that are packed into words, one or two per word ----
 *
 * 4-byte elements are changed through the aligned 8-byte word that contains them, never by a 4-byte
 * atomic, because C11 (and ThreadSanitizer) order accesses to one location only if all accesses
 * have the same size. */

/* Returns the bytes of an element if words_add can add this dtype, or 0 otherwise. */
static inline uint64_t addable_bytes(uint32_t dtype) {
    switch (dtype) {
    case TUTTI_F64:
    case TUTTI_I64:
        return 8;
    case TUTTI_F32:
    case TUTTI_I32:
        return 4;
    default:
        return 0;
    }
}

static inline uint64_t words_add(uint64_t a, uint64_t b, uint32_t dtype) {
    uint64_t sum;
    if (dtype == TUTTI_I64)
        return a + b;
    if (dtype == TUTTI_F64) {
        double x, y;
        memcpy(&x, &a, 8);
        memcpy(&y, &b, 8);
        x += y;
        memcpy(&sum, &x, 8);
    } else if (dtype == TUTTI_F32) {
        float x[2], y[2];
        memcpy(x, &a, 8);
        memcpy(y, &b, 8);
        x[0] += y[0];
        x[1] += y[1];
        memcpy(&sum, x, 8);
    } else {
        uint32_t x[2], y[2];
        memcpy(x, &a, 8);
        memcpy(y, &b, 8);
        x[0] += y[0];
        x[1] += y[1];
        memcpy(&sum, x, 8);
    }
    return sum;
}

/* ---- Cells ---- */

/* Returns 1 and the version. If there is no value, returns 0, and `*version` is 0 or the version of
 * the deletion. Returns TUTTI_OVERTAKEN if writers overtook every attempt. */
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

/* Returns 0 and the claimed state, or TUTTI_BUSY minus the rank of the writer that holds the
 * claim. */
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

/* Publishes the payload that was written to cell_next(), and returns its version. Versions count
 * from 1. If the claim was lost, publishes nothing and returns 0. */
static inline uint64_t cell_publish(uint64_t *state, uint64_t claimed, int present) {
    uint64_t version = cell_version(claimed) + 1;
    uint64_t next = version << TUTTI_VERSION_SHIFT | (present ? 0 : CELL_ABSENT);
    return __atomic_compare_exchange_n(state, &claimed, next, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)
               ? version
               : 0;
}

/* The copy of the payload with the current version, and the copy for the next version. */
static inline uint64_t *cell_now(uint64_t *payload, uint64_t claimed, uint64_t bytes) {
    return payload + (cell_version(claimed) & 1) * words_of(bytes);
}

static inline uint64_t *cell_next(uint64_t *payload, uint64_t claimed, uint64_t bytes) {
    return payload + ((cell_version(claimed) + 1) & 1) * words_of(bytes);
}

#endif
