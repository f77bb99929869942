/* Elementwise reductions, each addition rounded to the tensors' dtype as torch rounds it. */
#include "shm.h"
#include <string.h>

#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

static inline uint32_t bits(float value) {
    uint32_t result;
    memcpy(&result, &value, 4);
    return result;
}

static inline float from_bits(uint32_t value) {
    float result;
    memcpy(&result, &value, 4);
    return result;
}

static inline float same_f32(float value) { return value; }
static inline double same_f64(double value) { return value; }
static inline float load_bf16(uint16_t value) { return from_bits((uint32_t)value << 16); }

static inline uint16_t store_bf16(float value) {
    uint32_t raw = bits(value);
    return value != value ? 0x7fc0 : (raw + 0x7fff + ((raw >> 16) & 1)) >> 16; /* to the nearest, ties to even */
}

static inline float load_f16(uint16_t value) {
    uint32_t raw = (uint32_t)(value & 0x7fff) << 13, exponent = value & 0x7c00;
    uint32_t special = exponent == 0x7c00 ? raw | 0x7f800000 : raw + (112u << 23);
    float subnormal = from_bits(raw + (113u << 23)) - 0x1p-14f;
    return from_bits((exponent ? special : bits(subnormal)) | (uint32_t)(value & 0x8000) << 16);
}

static inline uint16_t store_f16(float value) {
    uint32_t sign = bits(value) >> 16 & 0x8000, raw = bits(value) & 0x7fffffff;
    uint32_t normal = (raw - (112u << 23) + 0xfff + (raw >> 13 & 1)) >> 13; /* to the nearest, ties to even */
    /* the last place of 0.5f is the smallest subnormal */
    uint32_t subnormal = bits(from_bits(raw) + 0.5f) - bits(0.5f);
    uint32_t result = raw < 113u << 23 ? subnormal : normal;
    result = raw >= 143u << 23 ? 0x7c00 : result;
    result = raw > 0x7f800000 ? 0x7e00 : result;
    return result | sign;
}

#define LOOP(NAME, T, VALUE, LOAD, RESULT)                                                                             \
    static void NAME(void *out, const void *left, const void *right, int64_t count) {                                  \
        INDEPENDENT for (int64_t i = 0; i < count; i++) {                                                              \
            T x = ((const T *)left)[i], y = ((const T *)right)[i];                                                     \
            VALUE a = LOAD(x), b = LOAD(y);                                                                            \
            ((T *)out)[i] = RESULT;                                                                                    \
        }                                                                                                              \
    }

/* Minimum and maximum return a NaN on either side, as torch.minimum and torch.maximum do. */
#define FLOATS(DTYPE, T, VALUE, LOAD, STORE)                                                                           \
    LOOP(sum_##DTYPE, T, VALUE, LOAD, STORE(a + b))                                                                    \
    LOOP(product_##DTYPE, T, VALUE, LOAD, STORE(a *b))                                                                 \
    LOOP(min_##DTYPE, T, VALUE, LOAD, ((a < b) | (a != a)) ? x : y)                                                    \
    LOOP(max_##DTYPE, T, VALUE, LOAD, ((a > b) | (a != a)) ? x : y)                                                    \
    static void divide_##DTYPE(void *values, int64_t count, int64_t by) {                                              \
        for (int64_t i = 0; i < count; i++)                                                                            \
            ((T *)values)[i] = STORE(LOAD(((T *)values)[i]) / (VALUE)by);                                              \
    }

/* Sums and products wrap around, which in C only unsigned numbers may. */
#define INTEGERS(DTYPE, T)                                                                                             \
    LOOP(sum_##DTYPE, T, uint64_t, (uint64_t), (T)(a + b))                                                             \
    LOOP(product_##DTYPE, T, uint64_t, (uint64_t), (T)(a * b))                                                         \
    LOOP(min_##DTYPE, T, T, (T), a < b ? a : b)                                                                        \
    LOOP(max_##DTYPE, T, T, (T), a > b ? a : b)

FLOATS(f32, float, float, same_f32, same_f32)
FLOATS(f64, double, double, same_f64, same_f64)
FLOATS(bf16, uint16_t, float, load_bf16, store_bf16)
FLOATS(f16, uint16_t, float, load_f16, store_f16)
INTEGERS(u8, uint8_t)
INTEGERS(i8, int8_t)
INTEGERS(i16, int16_t)
INTEGERS(i32, int32_t)
INTEGERS(i64, int64_t)

#define COMBINE(DTYPE) {sum_##DTYPE, min_##DTYPE, max_##DTYPE, product_##DTYPE, sum_##DTYPE}
enum { AVG = 4, BLOCK = 8192 };
static const int64_t WIDTH[] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
static void (*const DIVIDE[])(void *, int64_t, int64_t) = {divide_f32, divide_f64, divide_bf16, divide_f16};
static void (*const COMBINES[][5])(void *, const void *, const void *, int64_t) = {
    COMBINE(f32), COMBINE(f64), COMBINE(bf16), COMBINE(f16), COMBINE(u8),
    COMBINE(i8),  COMBINE(i16), COMBINE(i32),  COMBINE(i64)};

/* Writes the `op` over at least two sources, ((s0 + s1) + s2) + ..., to every out; an out may be one of the sources.
 * Works in blocks, so that partial sums stay in the first-level cache. `dtype` and `op` are indices into the tables
 * above. */
void shoal_reduce(char *const *outs, int64_t num_outs, const char *const *sources, int64_t num_sources, int64_t bytes,
                  int64_t dtype, int64_t op) {
    _Alignas(64) char scratch[BLOCK];
    for (int64_t start = 0; start < bytes; start += BLOCK) {
        int64_t length = bytes - start < BLOCK ? bytes - start : BLOCK, count = length / WIDTH[dtype];
        const char *total = sources[0] + start;
        for (int64_t source = 1; source < num_sources; source++) {
            char *out = source == num_sources - 1 ? outs[0] + start : scratch;
            COMBINES[dtype][op](out, total, sources[source] + start, count);
            total = out;
        }
        if (op == AVG)
            DIVIDE[dtype](outs[0] + start, count, num_sources);
        for (int64_t out = 1; out < num_outs; out++)
            memcpy(outs[out] + start, outs[0] + start, length);
    }
}
