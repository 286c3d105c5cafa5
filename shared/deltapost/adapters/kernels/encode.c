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

/* Values, plus what earlier rounds left behind where there is a `residual`, padded with +0 to `size`. */
static void add(const float *values, const float *residual, int count, int size, float *restrict out) {
    if (residual)
        for (int i = 0; i < count; i++)
            out[i] = values[i] + residual[i];
    else
        memcpy(out, values, sizeof(float) * (size_t)count);
    memset(out + count, 0, sizeof(float) * (size_t)(size - count));
}

static void block_of(const float *values, const float *residual, int64_t block, int count, float *out) {
    add(values + block * BLOCK, residual ? residual + block * BLOCK : NULL, count, BLOCK, out);
}

/* The largest magnitude's bits of values plus residual: for F8's scale. */
EXPORT uint32_t deltapost_largest(const float *values, const float *residual, int64_t elements, int64_t begin,
                                  int64_t end) {
    int64_t stop = end * BLOCK < elements ? end * BLOCK : elements;
    /* Magnitudes are below 2^31: compared as signed numbers, which every level can. */
    int32_t largest = 0;
    if (residual == NULL) {
        for (int64_t i = begin * BLOCK; i < stop; i++) {
            int32_t magnitude = (int32_t)(bits_of(values[i]) & 0x7fffffff);
            largest = magnitude > largest ? magnitude : largest;
        }
        return (uint32_t)largest;
    }
    for (int64_t i = begin * BLOCK; i < stop; i++) {
        int32_t magnitude = (int32_t)(bits_of(values[i] + residual[i]) & 0x7fffffff);
        largest = magnitude > largest ? magnitude : largest;
    }
    return (uint32_t)largest;
}

/* encode_f8, and what the codes leave out: what `decode_f8` would give is there without codes. A zero is +0. */
static void split_f8(const float *restrict x, int count, int32_t exponent, uint8_t *restrict codes,
                     float *restrict left) {
    if (exponent == INT32_MIN) {
        memset(codes, 0, (size_t)count);
        memcpy(left, x, sizeof(float) * (size_t)count);
        return;
    }
    float inverse = float_of((uint32_t)(127 - exponent) << 23);
    float scale = float_of((uint32_t)(exponent + 127) << 23);
    int32_t most = f8_most(exponent);
    for (int i = 0; i < count; i++) {
        uint32_t bits = bits_of(x[i] * inverse);
        struct rounded to = e4m3_of(bits, most);
        uint32_t sign = to.code ? bits & 0x80000000u : 0;
        codes[i] = (uint8_t)(to.code | sign >> 24);
        left[i] = x[i] - float_of(bits_of(to.value) | sign) * scale;
    }
}

/* encode_f4, and what the codes leave out, of `whole` values: a multiple of 32. */
static int split_f4(const float *restrict x, int whole, uint8_t *restrict out, uint8_t *restrict scales,
                    float *restrict left) {
    uint8_t codes[BLOCK];
    int non_finite = 0;
    for (int start = 0; start < whole; start += F4_BLOCK) {
        int32_t field = (int32_t)(largest_bits(x + start, F4_BLOCK) >> 23);
        non_finite |= field == 255;
        int32_t exponent = field < 1 ? 0 : field - 129 > -126 ? field - 129 : -126;
        float inverse = float_of((uint32_t)(127 - exponent) << 23);
        float scale = float_of((uint32_t)(exponent + 127) << 23);
        scales[start / F4_BLOCK] = (uint8_t)(exponent + 127);
        for (int i = start; i < start + F4_BLOCK; i++) {
            uint32_t bits = bits_of(x[i] * inverse);
            struct rounded to = e2m1_of(bits);
            uint32_t sign = to.code ? bits & 0x80000000u : 0;
            codes[i] = (uint8_t)(to.code | sign >> 28);
            left[i] = x[i] - float_of(bits_of(to.value) | sign) * scale;
        }
    }
    for (int i = 0; i < whole / 2; i++)
        out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    return non_finite;
}

/* Elements that are split at a time: few, so that memory goes on reading ahead meanwhile. */
enum { SPLIT = 512 };

/* Quantized codes and scales of elements `begin` to `end`, and what they leave out. */
static int split(int format, int32_t exponent, const float *values, const float *residual, int64_t begin,
                 int64_t end, uint8_t *codes, uint8_t *scales, float *left_out) {
    float x[SPLIT], tail[SPLIT];
    int non_finite = 0;
    for (int64_t at = begin; at < end; at += SPLIT) {
        int count = end - at < SPLIT ? (int)(end - at) : SPLIT;
        float *left = count == SPLIT ? left_out + at : tail;
        add(values + at, residual ? residual + at : NULL, count, SPLIT, x);
        if (format == FORMAT_F8)
            split_f8(x, count, exponent, codes + at, left);
        else
            non_finite |= split_f4(x, (count + F4_BLOCK - 1) / F4_BLOCK * F4_BLOCK, codes + at / 2,
                                   scales + at / F4_BLOCK, left);
        if (left == tail)
            memcpy(left_out + at, tail, sizeof(float) * (size_t)count);
    }
    return non_finite;
}

/* Codes and scales of values plus residual; what the codes leave out becomes the new residual, where there is
 * room for one (it may be the old one's). Returns whether a NaN or an infinity was among them. */
EXPORT int deltapost_encode(int format, int32_t exponent, const float *values, const float *residual,
                            int64_t elements, int64_t begin, int64_t end, uint8_t *codes, uint8_t *scales,
                            float *left_out) {
    float x[BLOCK], again[BLOCK];
    int non_finite = 0;
    if (left_out && (format == FORMAT_F8 || format == FORMAT_F4)) {
        int64_t stop = end * BLOCK < elements ? end * BLOCK : elements;
        return split(format, exponent, values, residual, begin * BLOCK, stop, codes, scales, left_out);
    }
    for (int64_t block = begin; block < end; block++) {
        int64_t at = block * BLOCK;
        int count = count_of(block, elements);
        block_of(values, residual, block, count, x);
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
            decode(format, codes, NULL, at, count, BLOCK, again);
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
        block_of(a, NULL, block, count, left);
        block_of(b, NULL, block, count, right);
        sums[block] = tree_dot(left, right);
    }
}
