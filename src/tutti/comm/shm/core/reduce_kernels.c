/* Reductions of n arrays into one, with the vector instructions of this machine.
 *
 * Elements are combined in the order of the sources, for every instruction set and for every split
 * of an array. So equal sources give bitwise equal results. The minimum and maximum of NaN and any
 * number are NaN, as in torch. */
#include "internal.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Further addresses, besides `out`, to which a result is written. */
typedef struct {
    void *const *to;
    uint32_t count;
    bool streaming;
} extra_copies;

typedef void (*reduction)(void *out, const void *const *parts, uint32_t n, uint64_t count,
                          const extra_copies *copies);

/* Elements are independent: `out` may be the memory of a source, but does not overlap the memory of
 * a source at any other offset. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define FLOAT_MIN(a, b) ((((a) < (b)) | ((a) != (a))) ? (a) : (b))
#define FLOAT_MAX(a, b) ((((a) > (b)) | ((a) != (a))) ? (a) : (b))
#define INTEGER_MIN(a, b) ((a) < (b) ? (a) : (b))
#define INTEGER_MAX(a, b) ((a) > (b) ? (a) : (b))
#define BIT_AND(a, b) ((a) & (b))
#define BIT_OR(a, b) ((a) | (b))
#define BIT_XOR(a, b) ((a) ^ (b))
#define TRUTH(x) ((x) != 0)

#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ALWAYS_INLINE uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

ALWAYS_INLINE float float_of_bfloat(uint16_t half)
{
    return float_of_bits((uint32_t)half << 16);
}

ALWAYS_INLINE uint16_t bfloat_of_float(float value) /* to nearest, ties to even */
{
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

#if defined(__aarch64__)
ALWAYS_INLINE float float_of_half(uint16_t half)
{
    __fp16 value;
    memcpy(&value, &half, sizeof value);
    return (float)value;
}

ALWAYS_INLINE uint16_t half_of_float(float value)
{
    __fp16 narrow = (__fp16)value;
    uint16_t half;
    memcpy(&half, &narrow, sizeof half);
    return half;
}
#else
ALWAYS_INLINE float float_of_half(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
    float value = float_of_bits(magnitude) * 0x1p112f; /* subnormals included */
    uint32_t bits = bits_of_float(value);
    if (magnitude >= 0x0f800000u) /* infinity and NaN */
        bits = magnitude | 0x7f800000u;
    return float_of_bits(bits | (uint32_t)(half & 0x8000u) << 16);
}

ALWAYS_INLINE uint16_t half_of_float(float value) /* to nearest, ties to even */
{
    uint32_t bits = bits_of_float(value), sign = bits & 0x80000000u, magnitude = bits ^ sign;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* After 0.5 is added, the lowest bits of the sum are the subnormal float16, rounded. */
    uint32_t tiny = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    uint32_t half = magnitude < (113u << 23) ? tiny : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (uint16_t)(half | sign >> 16);
}
#endif

#define TARGET
#define NAMED(name) base_##name
#include "reduce_kernels.h"
#undef TARGET
#undef NAMED

#if defined(__x86_64__) && !defined(PLAIN_VECTORS) /* defined by tests, to compile faster */
#define HAS_F16C
#define TARGET __attribute__((target("avx2,f16c")))
#define NAMED(name) avx2_##name
#include "reduce_kernels.h"
#undef TARGET
#undef NAMED
#define TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define NAMED(name) avx512_##name
#include "reduce_kernels.h"
#undef TARGET
#undef NAMED

static int vector_level(void)
{
    static atomic_int known = -1;
    int level = atomic_load_explicit(&known, memory_order_relaxed);
    if (level >= 0)
        return level;
    __builtin_cpu_init();
    level = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
        level = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                    ? 2
                    : 1;
    atomic_store_explicit(&known, level, memory_order_relaxed);
    return level;
}

static reduction find(uint32_t dtype, uint32_t reduce)
{
    switch (vector_level()) {
    case 2: return avx512_reductions[dtype][reduce];
    case 1: return avx2_reductions[dtype][reduce];
    default: return base_reductions[dtype][reduce];
    }
}

TUTTI_API const char *tutti_vector_code(void)
{
    static const char *const names[] = {"sse2", "avx2", "avx512"};
    return names[vector_level()];
}
#else
static reduction find(uint32_t dtype, uint32_t reduce)
{
    return base_reductions[dtype][reduce];
}

TUTTI_API const char *tutti_vector_code(void)
{
#if defined(__aarch64__)
    return "neon";
#else
    return "plain";
#endif
}
#endif

size_t dtype_bytes(uint32_t dtype)
{
    static const size_t sizes[] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 1};
    return dtype <= TUTTI_BYTES ? sizes[dtype] : 0;
}

const char *dtype_name(uint32_t dtype)
{
    static const char *const names[] = {"float64", "float32", "float16", "bfloat16",
                                        "int64",   "int32",   "int16",   "int8",
                                        "uint8",   "bool",    "bytes"};
    return dtype <= TUTTI_BYTES ? names[dtype] : "unknown dtype";
}

const char *reduce_name(uint32_t reduce)
{
    static const char *const names[] = {"sum", "avg",  "product", "min",
                                        "max", "band", "bor",     "bxor"};
    return reduce <= TUTTI_BXOR ? names[reduce] : "unknown reduction";
}

bool can_reduce(uint32_t dtype, uint32_t reduce)
{
    return dtype < TUTTI_BYTES && reduce <= TUTTI_BXOR && base_reductions[dtype][reduce];
}

void reduce_parts(void *out, const void *const *parts, uint32_t n, uint64_t count, uint32_t dtype,
                  uint32_t reduce)
{
    if (n == 1 && dtype != TUTTI_BOOL) {
        if (out != parts[0] && count)
            memmove(out, parts[0], count * dtype_bytes(dtype));
        return;
    }
    find(dtype, reduce)(out, parts, n, count, &(extra_copies){0});
}

void reduce_and_copy(void *out, void *const *copies, uint32_t n_copies, bool streaming,
                   const void *const *parts, uint32_t n, uint64_t count, uint32_t dtype,
                   uint32_t reduce)
{
    find(dtype, reduce)(out, parts, n, count, &(extra_copies){copies, n_copies, streaming});
    if (streaming)
        stream_fence();
}

TUTTI_API int tutti_reduce_into(void *out, const void *const *parts, uint32_t n_parts,
                                uint64_t count, uint32_t dtype, uint32_t reduce)
{
    if (n_parts == 0)
        return fail(TUTTI_BAD_ARGUMENT, "n_parts must be at least 1, got 0");
    if (!can_reduce(dtype, reduce))
        return fail(TUTTI_BAD_ARGUMENT, "%s of %s is not defined", reduce_name(reduce),
                    dtype_name(dtype));
    reduce_parts(out, parts, n_parts, count, dtype, reduce);
    return 0;
}
