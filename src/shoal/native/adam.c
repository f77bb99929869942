/* Adam and AdamW (Kingma & Ba 2014, Loshchilov & Hutter 2017) over flat host memory in one pass: unscale, decay,
 * moments, update, and the bf16 weights that the module sees. optim/fused/host_adam.py holds the torch form. Elements
 * are taken in blocks that stay in the first-level cache, so that every loop is a simple one. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 512, MASTER_SPLIT = 1, GRAD_BF16 = 2, DECOUPLED = 4 };

struct shoal_adam {
    float beta1, beta2, eps, weight_decay, lr;
    float step_size;        /* lr / (1 - beta1^step) */
    float bias2_sqrt;       /* sqrt(1 - beta2^step) */
    float grad_factor;      /* gradients times this */
};

static void widen(float *to, const uint16_t *from, int n) {
    uint32_t bits[BLOCK];
    for (int i = 0; i < n; i++)
        bits[i] = (uint32_t)from[i] << 16;
    memcpy(to, bits, n * sizeof *to);
}

/* Rounds to nearest, ties to even; NaN stays NaN. */
static void narrow(uint16_t *to, const float *from, int n) {
    uint32_t bits[BLOCK];
    memcpy(bits, from, n * sizeof *from);
    for (int i = 0; i < n; i++) {
        uint32_t rounded = (bits[i] + 0x7FFFu + ((bits[i] >> 16) & 1u)) >> 16;
        to[i] = (uint16_t)((bits[i] & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
    }
}

/* fp32 = (upper << 16) + lower, exactly; upper, the bf16 of the module, is rounded half up (chunks/masters.py). */
static void join(float *to, const uint16_t *upper, const int16_t *lower, int n) {
    uint32_t bits[BLOCK];
    for (int i = 0; i < n; i++)
        bits[i] = ((uint32_t)upper[i] << 16) + (uint32_t)(int32_t)lower[i];
    memcpy(to, bits, n * sizeof *to);
}

static void part(uint16_t *upper, int16_t *lower, const float *from, int n) {
    uint32_t bits[BLOCK];
    memcpy(bits, from, n * sizeof *from);
    for (int i = 0; i < n; i++) {
        uint32_t high = (bits[i] + 0x8000u) >> 16;
        upper[i] = (uint16_t)high;
        lower[i] = (int16_t)(bits[i] - (high << 16));
    }
}

static void update(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, int n,
                   const struct shoal_adam *a, int decoupled) {
    float keep = decoupled ? 1 - a->lr * a->weight_decay : 1, decay = decoupled ? 0 : a->weight_decay;
    float new1 = 1 - a->beta1, new2 = 1 - a->beta2;
    for (int i = 0; i < n; i++) {
        float grad = g[i] * a->grad_factor + decay * p[i];
        m[i] += (grad - m[i]) * new1;
        v[i] = v[i] * a->beta2 + new2 * grad * grad;
        p[i] = p[i] * keep - a->step_size * m[i] / (sqrtf(v[i]) / a->bias2_sqrt + a->eps);
    }
}

/* Updates `elements` elements of `master`, `m` and `v` in place.
 *
 *     master     fp32, or with MASTER_SPLIT the lower halves (int16) of values whose upper halves are `weights`
 *     grad       fp32, or bf16 with GRAD_BF16
 *     weights    bf16, gets the new values; or null
 *     kind       MASTER_SPLIT | GRAD_BF16 | DECOUPLED (AdamW's weight decay)
 */
void shoal_adam(void *master, const void *grad, float *m, float *v, uint16_t *weights, int64_t elements, int64_t kind,
                const struct shoal_adam *a) {
    float wide[BLOCK], gradient[BLOCK];
    for (int64_t start = 0; start < elements; start += BLOCK) {
        int n = elements - start < BLOCK ? (int)(elements - start) : BLOCK;
        float *p = kind & MASTER_SPLIT ? wide : (float *)master + start;
        const float *g = (const float *)grad + start;
        if (kind & MASTER_SPLIT)
            join(wide, weights + start, (int16_t *)master + start, n);
        if (kind & GRAD_BF16) {
            widen(gradient, (const uint16_t *)grad + start, n);
            g = gradient;
        }
        update(p, g, m + start, v + start, n, a, (kind & DECOUPLED) != 0);
        if (kind & MASTER_SPLIT)
            part(weights + start, (int16_t *)master + start, wide, n);
        else if (weights)
            narrow(weights + start, p, n);
    }
}
