/* Adding numbers that are packed into 8-byte words: one or two of them per word.
 *
 * 4-byte elements are always changed through the whole aligned word they lie in, never by a 4-byte
 * atomic, because C11 (and ThreadSanitizer) only order accesses of one size to one place. */
#ifndef TUTTI_WORDS_ADD_H
#define TUTTI_WORDS_ADD_H

#include <stdint.h>
#include <string.h>

#include "tutti_shm.h"

/* 0 for dtypes that cannot be added in words. */
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

#endif
