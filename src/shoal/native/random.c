/* Keyed random numbers; module/random/philox.py holds the torch form of each function. */
#include <stdint.h>

/* Philox4x32-10 (Salmon et al., SC'11): ten rounds of two 32x32->64 multiplications over a 128-bit counter. */
static inline void philox(uint64_t counter, uint64_t key, uint32_t out[4]) {
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

#define BLOCK 64 /* counters at a time: lanes of a vector register, several times */

/* Writes the dropout mask `kept` [samples, elements]. Element e = first + i of a sample survives (1) where word e % 4
 * of philox(e / 4) under the sample's key is >= threshold. */
void shoal_keep(uint8_t *kept, int64_t samples, int64_t elements, const int64_t *keys, uint32_t threshold,
                int64_t first) {
    for (int64_t s = 0; s < samples; s++) {
        uint8_t *row = kept + s * elements;
        uint64_t key = (uint64_t)keys[s];
        int64_t counter = first / 4, skip = first % 4;
        for (int64_t start = 0; start < elements; counter += BLOCK, skip = 0) {
            uint32_t words[BLOCK][4];
            for (int lane = 0; lane < BLOCK; lane++)
                philox((uint64_t)(counter + lane), key, words[lane]);
            int64_t stop = elements - start < 4 * BLOCK - skip ? elements - start : 4 * BLOCK - skip;
            const uint32_t *flat = &words[0][0] + skip;
            for (int64_t i = 0; i < stop; i++)
                row[start + i] = flat[i] >= threshold;
            start += stop;
        }
    }
}

/* The finaliser of SplitMix64 (Steele et al. 2014), as `mix` in module/random/philox.py. */
static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Rounds master[i] (fp32) to data[i] (bf16), up or down by 16 random bits; chunks/masters.py holds the torch form. */
void shoal_round_stochastically(uint16_t *data, const uint32_t *master, int64_t elements, int64_t key, int64_t start) {
    for (int64_t i = 0; i < elements; i++) {
        uint32_t bits = master[i], finite = (bits & 0x7F800000u) != 0x7F800000u;
        uint32_t draw = (uint32_t)(mix((uint64_t)(start + i) ^ (uint64_t)key) & 0xFFFFu);
        data[i] = (uint16_t)((bits + (finite ? draw : 0)) >> 16);
    }
}
