/* The reduction loops. reduce_kernels.c includes this file once per instruction set. TARGET is the
 * function attribute that selects the instruction set, and NAMED(x) is a distinct name for each
 * function.
 *
 * All sources are read in one pass and combined in the given order. 16-bit floats are combined in
 * float32 and rounded once. `out` and an extra copy may be the memory of a source, but must not
 * overlap the memory of a source at any other offset. */

#define BLOCK 512 /* elements: the accumulators of one block fit into the L1 cache */
#define PAIR_BLOCK 64 /* elements, for two sources, which need no accumulators */

#define SAME(x, n) (x)
#define MEAN(x, n) ((x) / (n))

/* Writes the result's bytes at offset `at` to the extra addresses, while these bytes are in the L1
 * cache. Cache lines that were read as sources are already in this CPU's cache. For such lines,
 * non-temporal stores were measured to take twice as long. Non-temporal stores are faster for lines
 * that another CPU holds (copy.c). */
static TARGET void NAMED(write_copies)(const extra_copies *copies, const void *out, uint64_t at, uint64_t bytes)
{
    for (uint32_t p = 0; p < copies->count; p++) {
        unsigned char *target = (unsigned char *)copies->to[p] + at;
        if (copies->streaming)
            stream_bytes(target, (const unsigned char *)out + at, bytes);
        else
            memcpy(target, (const unsigned char *)out + at, bytes);
    }
}

#define REDUCTION(name, stored, wide, LOAD, STORE, COMBINE, FINISH)                               \
    static TARGET void NAMED(name)(void *to, const void *const *parts, uint32_t n, uint64_t count, \
                                   const extra_copies *copies)                                           \
    {                                                                                              \
        stored *out = to;                                                                          \
        const wide divisor = (wide)n;                                                              \
        (void)divisor;                                                                             \
        if (n == 2) {                                                                              \
            uint64_t most = copies->count ? PAIR_BLOCK : count;                                    \
            for (uint64_t start = 0; start < count; start += most) {                               \
                uint64_t length = count - start < most ? count - start : most;                     \
                const stored *a = (const stored *)parts[0] + start;                                \
                const stored *b = (const stored *)parts[1] + start;                                \
                stored *sums = out + start;                                                        \
                INDEPENDENT for (uint64_t i = 0; i < length; i++)                                  \
                {                                                                                  \
                    wide left = LOAD(a[i]), right = LOAD(b[i]), both = COMBINE(left, right);       \
                    sums[i] = STORE(FINISH(both, divisor));                                        \
                }                                                                                  \
                NAMED(write_copies)(copies, out, start * sizeof(stored), length * sizeof(stored));      \
            }                                                                                      \
            return;                                                                                \
        }                                                                                          \
        wide sum[BLOCK];                                                                           \
        for (uint64_t start = 0; start < count; start += BLOCK) {                                  \
            uint64_t length = count - start < BLOCK ? count - start : BLOCK;                       \
            const stored *a = (const stored *)parts[0] + start;                                    \
            for (uint64_t i = 0; i < length; i++)                                                  \
                sum[i] = LOAD(a[i]);                                                               \
            for (uint32_t p = 1; p + 1 < n; p++) {                                                 \
                const stored *b = (const stored *)parts[p] + start;                                \
                for (uint64_t i = 0; i < length; i++) {                                            \
                    wide left = sum[i], right = LOAD(b[i]);                                        \
                    sum[i] = COMBINE(left, right);                                                 \
                }                                                                                  \
            }                                                                                      \
            if (n == 1) {                                                                          \
                for (uint64_t i = 0; i < length; i++)                                              \
                    out[start + i] = STORE(sum[i]);                                                \
                continue;                                                                          \
            }                                                                                      \
            const stored *z = (const stored *)parts[n - 1] + start;                                \
            INDEPENDENT for (uint64_t i = 0; i < length; i++)                                      \
            {                                                                                      \
                wide left = sum[i], right = LOAD(z[i]), all = COMBINE(left, right);                \
                out[start + i] = STORE(FINISH(all, divisor));                                      \
            }                                                                                      \
            NAMED(write_copies)(copies, out, start * sizeof(stored), length * sizeof(stored));          \
        }                                                                                          \
    }

/* float16 is converted to float32 and back in blocks, with the conversion instructions of the
 * processor (F16C) if it has them. bfloat16 needs only shifts, so REDUCTION converts each
 * element. */
#if defined(__x86_64__) && defined(HAS_F16C)
static TARGET void NAMED(widen)(float *to, const uint16_t *from, uint64_t count)
{
    uint64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < count; i++)
        to[i] = _cvtsh_ss(from[i]);
}

static TARGET void NAMED(narrow)(uint16_t *to, const float *from, uint64_t count)
{
    uint64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
    for (; i < count; i++)
        to[i] = _cvtss_sh(from[i], 0);
}
#else
static TARGET void NAMED(widen)(float *to, const uint16_t *from, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        to[i] = float_of_half(from[i]);
}

static TARGET void NAMED(narrow)(uint16_t *to, const float *from, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        to[i] = half_of_float(from[i]);
}
#endif

#define HALF_REDUCTION(name, COMBINE, FINISH)                                                      \
    static TARGET void NAMED(name)(void *to, const void *const *parts, uint32_t n, uint64_t count, \
                                   const extra_copies *copies)                                           \
    {                                                                                              \
        float sum[BLOCK], next[BLOCK];                                                             \
        const float divisor = (float)n;                                                            \
        (void)divisor;                                                                             \
        for (uint64_t start = 0; start < count; start += BLOCK) {                                  \
            uint64_t length = count - start < BLOCK ? count - start : BLOCK;                       \
            NAMED(widen)(sum, (const uint16_t *)parts[0] + start, length);                         \
            for (uint32_t p = 1; p < n; p++) {                                                     \
                NAMED(widen)(next, (const uint16_t *)parts[p] + start, length);                    \
                for (uint64_t i = 0; i < length; i++) {                                            \
                    float left = sum[i], right = next[i];                                          \
                    sum[i] = COMBINE(left, right);                                                 \
                }                                                                                  \
            }                                                                                      \
            for (uint64_t i = 0; i < length; i++)                                                  \
                sum[i] = FINISH(sum[i], divisor);                                                  \
            NAMED(narrow)((uint16_t *)to + start, sum, length);                                    \
            NAMED(write_copies)(copies, to, start * sizeof(uint16_t), length * sizeof(uint16_t));       \
        }                                                                                          \
    }

#define PLAIN(x) (x)
#define FLOATS(name, stored, wide, LOAD, STORE)                                                    \
    REDUCTION(name##_sum, stored, wide, LOAD, STORE, ADD, SAME)                                    \
    REDUCTION(name##_avg, stored, wide, LOAD, STORE, ADD, MEAN)                                    \
    REDUCTION(name##_product, stored, wide, LOAD, STORE, MULTIPLY, SAME)                           \
    REDUCTION(name##_min, stored, wide, LOAD, STORE, FLOAT_MIN, SAME)                              \
    REDUCTION(name##_max, stored, wide, LOAD, STORE, FLOAT_MAX, SAME)
/* `number` is the type of an element, and `bits` is the unsigned type of the same size. Sums and
 * products wrap around, so they are computed with unsigned numbers. */
#define INTEGERS(name, number, bits)                                                               \
    REDUCTION(name##_sum, bits, bits, PLAIN, PLAIN, ADD, SAME)                                     \
    REDUCTION(name##_product, bits, bits, PLAIN, PLAIN, MULTIPLY, SAME)                            \
    REDUCTION(name##_min, number, number, PLAIN, PLAIN, INTEGER_MIN, SAME)                         \
    REDUCTION(name##_max, number, number, PLAIN, PLAIN, INTEGER_MAX, SAME)                         \
    REDUCTION(name##_band, bits, bits, PLAIN, PLAIN, BIT_AND, SAME)                                \
    REDUCTION(name##_bor, bits, bits, PLAIN, PLAIN, BIT_OR, SAME)                                  \
    REDUCTION(name##_bxor, bits, bits, PLAIN, PLAIN, BIT_XOR, SAME)

FLOATS(f64, double, double, PLAIN, PLAIN)
FLOATS(f32, float, float, PLAIN, PLAIN)
FLOATS(bf16, uint16_t, float, float_of_bfloat, bfloat_of_float)
HALF_REDUCTION(f16_sum, ADD, SAME)
HALF_REDUCTION(f16_avg, ADD, MEAN)
HALF_REDUCTION(f16_product, MULTIPLY, SAME)
HALF_REDUCTION(f16_min, FLOAT_MIN, SAME)
HALF_REDUCTION(f16_max, FLOAT_MAX, SAME)
INTEGERS(i64, int64_t, uint64_t)
INTEGERS(i32, int32_t, uint32_t)
INTEGERS(i16, int16_t, uint16_t)
INTEGERS(i8, int8_t, uint8_t)
INTEGERS(u8, uint8_t, uint8_t)
REDUCTION(bool_or, uint8_t, uint8_t, TRUTH, PLAIN, BIT_OR, SAME)
REDUCTION(bool_and, uint8_t, uint8_t, TRUTH, PLAIN, BIT_AND, SAME)
REDUCTION(bool_xor, uint8_t, uint8_t, TRUTH, PLAIN, BIT_XOR, SAME)

#define FLOAT_ROW(name)                                                                            \
    {                                                                                              \
        [TUTTI_SUM] = NAMED(name##_sum), [TUTTI_AVG] = NAMED(name##_avg),                          \
        [TUTTI_PRODUCT] = NAMED(name##_product), [TUTTI_MIN] = NAMED(name##_min),                  \
        [TUTTI_MAX] = NAMED(name##_max)                                                            \
    }
#define INTEGER_ROW(name)                                                                          \
    {                                                                                              \
        [TUTTI_SUM] = NAMED(name##_sum), [TUTTI_PRODUCT] = NAMED(name##_product),                  \
        [TUTTI_MIN] = NAMED(name##_min), [TUTTI_MAX] = NAMED(name##_max),                          \
        [TUTTI_BAND] = NAMED(name##_band), [TUTTI_BOR] = NAMED(name##_bor),                        \
        [TUTTI_BXOR] = NAMED(name##_bxor)                                                          \
    }

static const reduction NAMED(reductions)[TUTTI_BYTES][TUTTI_BXOR + 1] = {
    [TUTTI_F64] = FLOAT_ROW(f64),
    [TUTTI_F32] = FLOAT_ROW(f32),
    [TUTTI_F16] = FLOAT_ROW(f16),
    [TUTTI_BF16] = FLOAT_ROW(bf16),
    [TUTTI_I64] = INTEGER_ROW(i64),
    [TUTTI_I32] = INTEGER_ROW(i32),
    [TUTTI_I16] = INTEGER_ROW(i16),
    [TUTTI_I8] = INTEGER_ROW(i8),
    [TUTTI_U8] = INTEGER_ROW(u8),
    [TUTTI_BOOL] = {[TUTTI_SUM] = NAMED(bool_or), [TUTTI_PRODUCT] = NAMED(bool_and),
                    [TUTTI_MIN] = NAMED(bool_and), [TUTTI_MAX] = NAMED(bool_or),
                    [TUTTI_BAND] = NAMED(bool_and), [TUTTI_BOR] = NAMED(bool_or),
                    [TUTTI_BXOR] = NAMED(bool_xor)},
};

#undef BLOCK
#undef PAIR_BLOCK
#undef SAME
#undef MEAN
#undef REDUCTION
#undef HALF_REDUCTION
#undef PLAIN
#undef FLOATS
#undef INTEGERS
#undef FLOAT_ROW
#undef INTEGER_ROW
