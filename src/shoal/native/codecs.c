/* Row-wise codecs. comm/codecs/ documents the layout of a row and holds the torch form of each function, which gives
 * the same bits.
 *
 * Reductions loop over LANES partial results (the vector registers), where a single one would tie the compiler to one
 * order of the elements. Headers go through memcpy since a row may start at any address.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 64
#define SMALLEST_RANGE 1e-36f /* below it the reciprocal would overflow: such a row decodes to its minimum */
#define INFINITE 0x7f800000u  /* bits of +Inf: those of |x| are not smaller where x is Inf or NaN */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline uint32_t magnitude(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffffu;
}

/* Minimum and range of a row, with +0 for -0; both NaN if an element is not finite or the range overflows. */
static inline void row_range(const float *x, int64_t n, float *minimum, float *range) {
    float low[LANES], high[LANES];
    uint32_t top[LANES] = {0};
    for (int l = 0; l < LANES; l++)
        low[l] = high[l] = x[0];
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            float v = x[i + l];
            low[l] = v < low[l] ? v : low[l];
            high[l] = v > high[l] ? v : high[l];
            top[l] = magnitude(v) > top[l] ? magnitude(v) : top[l];
        }
    for (; i < n; i++) {
        low[0] = x[i] < low[0] ? x[i] : low[0];
        high[0] = x[i] > high[0] ? x[i] : high[0];
        top[0] = magnitude(x[i]) > top[0] ? magnitude(x[i]) : top[0];
    }
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) {
            low[l] = low[l + half] < low[l] ? low[l + half] : low[l];
            high[l] = high[l + half] > high[l] ? high[l + half] : high[l];
            top[l] = top[l + half] > top[l] ? top[l + half] : top[l];
        }
    *minimum = low[0] + 0.0f;
    *range = (high[0] + 0.0f) - *minimum;
    if (top[0] >= INFINITE || magnitude(*range) >= INFINITE)
        *minimum = *range = NAN;
}

/* Writes the header {scale, minimum} of a row of codes up to `levels`; returns the factor from x - minimum to code. */
static inline float row_header(float range, float minimum, float levels, uint8_t *out) {
    float header[2] = {range * (1.0f / levels), minimum};
    memcpy(out, header, 8);
    return range > SMALLEST_RANGE ? 1.0f / range * levels : 0.0f;
}

/* Encodes codes 0..255, a byte each. */
void shoal_u8_encode(const float *flat, int64_t numel, int64_t row, uint8_t *out) {
    for (int64_t start = 0; start < numel; start += row) {
        const float *x = flat + start;
        int64_t n = least(row, numel - start);
        float minimum, range;
        row_range(x, n, &minimum, &range);
        float factor = row_header(range, minimum, 255.0f, out);
        uint8_t *codes = out + 8;
        if (isnan(range))
            memset(codes, 0, n);
        else
            for (int64_t i = 0; i < n; i++)
                codes[i] = (uint8_t)(int32_t)rintf((x[i] - minimum) * factor);
        out = codes + n;
    }
}

/* Encodes codes 0..15, two a byte: the row's first half in the low nibbles, its second half in the high ones. */
void shoal_u4_encode(const float *flat, int64_t numel, int64_t row, uint8_t *out) {
    for (int64_t start = 0; start < numel; start += row) {
        const float *x = flat + start;
        int64_t n = least(row, numel - start), half = (n + 1) / 2, pairs = n / 2;
        float minimum, range;
        row_range(x, n, &minimum, &range);
        float factor = row_header(range, minimum, 15.0f, out);
        uint8_t *codes = out + 8;
        if (isnan(range)) {
            memset(codes, 0, half);
        } else {
            for (int64_t i = 0; i < pairs; i++) {
                int32_t first = (int32_t)rintf((x[i] - minimum) * factor);
                int32_t second = (int32_t)rintf((x[i + half] - minimum) * factor);
                codes[i] = (uint8_t)(first | second << 4);
            }
            if (pairs < half)
                codes[pairs] = (uint8_t)(int32_t)rintf((x[pairs] - minimum) * factor);
        }
        out = codes + half;
    }
}

/* out = decoded, or out += factor * decoded. */
static inline void put(float *out, float decoded, float factor, int64_t add) {
    *out = add ? *out + factor * decoded : decoded;
}

void shoal_u8_decode(const uint8_t *data, int64_t numel, int64_t row, float *out, float factor, int64_t add) {
    for (int64_t start = 0; start < numel; start += row) {
        int64_t n = least(row, numel - start);
        float header[2];
        memcpy(header, data, 8);
        const uint8_t *codes = data + 8;
        for (int64_t i = 0; i < n; i++)
            put(out + start + i, (float)codes[i] * header[0] + header[1], factor, add);
        data = codes + n;
    }
}

void shoal_u4_decode(const uint8_t *data, int64_t numel, int64_t row, float *out, float factor, int64_t add) {
    for (int64_t start = 0; start < numel; start += row) {
        int64_t n = least(row, numel - start), half = (n + 1) / 2;
        float header[2];
        memcpy(header, data, 8);
        const uint8_t *codes = data + 8;
        for (int64_t i = 0; i < half; i++)
            put(out + start + i, (float)(codes[i] & 15) * header[0] + header[1], factor, add);
        for (int64_t i = half; i < n; i++)
            put(out + start + i, (float)(codes[i - half] >> 4) * header[0] + header[1], factor, add);
        data = codes + half;
    }
}

/* Sums |x| as a tree: pads the row with zeros to a power of two, adds its second half to its first, and repeats. */
static float sum_of_magnitudes(const float *x, int64_t n) {
    int64_t half = 1;
    while (2 * half < n)
        half *= 2;
    float sums[half];
    for (int64_t i = 0; i < half; i++)
        sums[i] = fabsf(x[i]);
    for (int64_t i = half; i < n; i++)
        sums[i - half] += fabsf(x[i]);
    while ((half /= 2) > 0)
        for (int64_t i = 0; i < half; i++)
            sums[i] += sums[i + half];
    return sums[0];
}

/* Encodes one bit an element, set if it is not negative: bit b of byte i is element b * ceil(n / 8) + i of the row. */
void shoal_sign_encode(const float *flat, int64_t numel, int64_t row, uint8_t *out) {
    for (int64_t start = 0; start < numel; start += row) {
        const float *x = flat + start;
        int64_t n = least(row, numel - start), bytes = (n + 7) / 8;
        float scale = sum_of_magnitudes(x, n) * (float)(1.0 / (double)n);
        if (isnan(scale))
            scale = NAN;
        memcpy(out, &scale, 4);
        uint8_t *bits = out + 4;
        if (n == 8 * bytes)
            for (int64_t i = 0; i < bytes; i++) {
                int32_t byte = 0;
                for (int b = 0; b < 8; b++)
                    byte |= (x[b * bytes + i] >= 0.0f) << b;
                bits[i] = (uint8_t)byte;
            }
        else {
            memset(bits, 0, bytes);
            for (int64_t i = 0; i < n; i++)
                bits[i % bytes] |= (uint8_t)((x[i] >= 0.0f) << (i / bytes));
        }
        out = bits + bytes;
    }
}

void shoal_sign_decode(const uint8_t *data, int64_t numel, int64_t row, float *out, float factor, int64_t add) {
    for (int64_t start = 0; start < numel; start += row) {
        int64_t n = least(row, numel - start), bytes = (n + 7) / 8;
        float scale;
        memcpy(&scale, data, 4);
        const uint8_t *bits = data + 4;
        for (int b = 0; b * bytes < n; b++) {
            float *plane = out + start + b * bytes;
            for (int64_t i = 0; i < least(bytes, n - b * bytes); i++)
                put(plane + i, bits[i] >> b & 1 ? scale : -scale, factor, add);
        }
        data = bits + bytes;
    }
}

/* Writes the ascending indices of the elements whose |x|, as bits, is at least `threshold` (so NaN counts as the
 * greatest). Returns how many there are, or -1 if they exceed `capacity`. */
int64_t shoal_at_least(const float *flat, int64_t numel, uint32_t threshold, int64_t capacity, int32_t *indices) {
    int64_t count = 0;
    for (int64_t start = 0; start < numel; start += LANES) {
        const float *x = flat + start;
        int64_t n = least(LANES, numel - start);
        uint32_t any = 0;
        for (int64_t i = 0; i < n; i++)
            any |= magnitude(x[i]) >= threshold;
        if (!any)
            continue;
        if (count + n > capacity)
            return -1;
        for (int64_t i = 0; i < n; i++) {
            indices[count] = (int32_t)(start + i);
            count += magnitude(x[i]) >= threshold;
        }
    }
    return count;
}
