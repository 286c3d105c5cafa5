/* What learners need of one tensor: codes and scales, with what they leave behind, and values and sums of them.
 *
 * Each function does blocks `begin` to `end` of a tensor of `elements`: threads are given disjoint ranges.
 */
#include "formats.h"
#include "tree.h"

static int count_of(int64_t block, int64_t elements) {
    int64_t left = elements - block * BLOCK;
    return left < BLOCK ? (int)left : BLOCK;
}

/* A block of values, plus what earlier rounds left behind where there is a `residual`, padded with +0. */
static void wanted(const float *values, const float *residual, int64_t block, int count, float *restrict out) {
    const float *from = values + block * BLOCK, *left = residual + (residual ? block * BLOCK : 0);
    if (residual)
        for (int i = 0; i < count; i++)
            out[i] = from[i] + left[i];
    else
        memcpy(out, from, sizeof(float) * (size_t)count);
    memset(out + count, 0, sizeof(float) * (size_t)(BLOCK - count));
}

/* The largest magnitude's bits of values plus residual: for F8's scale. */
EXPORT uint32_t deltapost_largest(const float *values, const float *residual, int64_t elements, int64_t begin,
                                  int64_t end) {
    float block_values[BLOCK];
    uint32_t largest = 0;
    for (int64_t block = begin; block < end; block++) {
        int count = count_of(block, elements);
        wanted(values, residual, block, count, block_values);
        uint32_t found = largest_bits(block_values, count);
        largest = found > largest ? found : largest;
    }
    return largest;
}

/* Codes and scales of values plus residual; what the codes leave out becomes the new residual, where there is
 * room for one (it may be the old one's). Returns whether a NaN or an infinity was among them. */
EXPORT int deltapost_encode(int format, int32_t exponent, const float *values, const float *residual,
                            int64_t elements, int64_t begin, int64_t end, uint8_t *codes, uint8_t *scales,
                            float *left_out) {
    float x[BLOCK], again[BLOCK];
    float scale = float_of((uint32_t)((exponent == INT32_MIN ? 0 : exponent) + 127) << 23);
    int non_finite = 0;
    for (int64_t block = begin; block < end; block++) {
        int64_t at = block * BLOCK;
        int count = count_of(block, elements);
        const uint8_t *block_scales = format == FORMAT_F8 ? (const uint8_t *)&scale : scales;
        wanted(values, residual, block, count, x);
        switch (format) {
        case FORMAT_F32:
            encode_f32(x, count, codes + 4 * at);
            break;
        case FORMAT_F16:
            encode_f16(x, count, codes + 2 * at);
            break;
        case FORMAT_BF16:
            encode_bf16(x, count, codes + 2 * at);
            break;
        case FORMAT_F8:
            encode_f8(x, count, exponent, codes + at);
            break;
        default:
            non_finite |= encode_f4(x, count, codes + at / 2, scales + at / F4_BLOCK);
        }
        if (left_out) {
            decode(format, codes, block_scales, at, count, BLOCK, again);
            for (int i = 0; i < count; i++)
                left_out[at + i] = x[i] - again[i];
        }
    }
    return non_finite;
}

/* The float32 values of codes and scales. */
EXPORT void deltapost_decode(int format, const uint8_t *codes, const uint8_t *scales, int64_t elements,
                             int64_t begin, int64_t end, float *out) {
    float values[BLOCK];
    for (int64_t block = begin; block < end; block++) {
        int count = count_of(block, elements);
        decode(format, codes, scales, block * BLOCK, count, count, values);
        memcpy(out + block * BLOCK, values, sizeof(float) * (size_t)count);
    }
}

/* sums[block] = the tree of a·b. */
EXPORT void deltapost_dots(const float *a, const float *b, int64_t elements, int64_t begin, int64_t end,
                           float *sums) {
    float left[BLOCK], right[BLOCK];
    for (int64_t block = begin; block < end; block++) {
        int count = count_of(block, elements);
        if (count == BLOCK) {
            sums[block] = tree_dot(a + block * BLOCK, b + block * BLOCK);
            continue;
        }
        wanted(a, NULL, block, count, left);
        wanted(b, NULL, block, count, right);
        sums[block] = tree_dot(left, right);
    }
}
