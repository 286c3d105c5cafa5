/* Float formats: elements of F32, F16, BF16, F8_E4M3 and F4 to float32 and back.
 *
 * The definitions are those of docs/exactness.md, and of adapters/floats.py and microscaling.py, to the bit.
 * Only integers and plain float32 + - * are used, so any compiler gives the same bytes at any level, as long as
 * it fuses nothing (-ffp-contract=off) and flushes nothing (no -ffast-math). All hosts are little-endian: the
 * loader refuses others.
 */
#ifndef DELTAPOST_FORMATS_H
#define DELTAPOST_FORMATS_H

#include <stdint.h>
#include <string.h>

enum { BLOCK = 4096, F4_BLOCK = 32 };
enum { FORMAT_F32, FORMAT_F16, FORMAT_BF16, FORMAT_F8, FORMAT_F4 };

#define EXPORT __attribute__((visibility("default")))

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- to float32: `count` elements of a block, at most BLOCK ---- */

static inline void decode_f16(const uint8_t *data, int count, float *restrict out) {
    for (int i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, data + 2 * i, 2);
        uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
        uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00 ? 224u << 23 : 112u << 23);
        /* Below 2^-14 the code counts in 2^-24: the conversion and the product are exact. */
        uint32_t small = bits_of((float)(int32_t)magnitude * 0x1p-24f);
        out[i] = float_of((magnitude < 0x400 ? small : normal) | sign);
    }
}

static inline void decode_bf16(const uint8_t *data, int count, float *restrict out) {
    for (int i = 0; i < count; i++) {
        uint16_t upper;
        memcpy(&upper, data + 2 * i, 2);
        out[i] = float_of((uint32_t)upper << 16);
    }
}

/* On sixteen-bit lanes as far as it goes: the upper halves of two float32 numbers whose difference is the code's
 * value. Below 2^-6 a code counts in 2^-9: it is a mantissa of 2^-6, which is taken off again, exactly; so a -0
 * that is read is +0. */
static inline void decode_f8(const uint8_t *data, int count, float scale, float *restrict out) {
    uint16_t whole[BLOCK], taken[BLOCK];
    for (int i = 0; i < count; i++) {
        uint16_t code = data[i], magnitude = code & 0x7f, sign = (uint16_t)((code & 0x80) << 8);
        uint16_t is_small = magnitude < 8 ? 0xffff : 0, is_nan = magnitude == 0x7f ? 0x7fc0 : 0;
        uint16_t normal = (uint16_t)((magnitude << 4) + (120 << 7) + (is_small & 1 << 7));
        whole[i] = normal | sign | is_nan;
        taken[i] = (is_small & 121 << 7) | sign;
    }
    for (int i = 0; i < count; i++)
        out[i] = (float_of((uint32_t)whole[i] << 16) - float_of((uint32_t)taken[i] << 16)) * scale;
}

/* The float32 of half an E8M0 scale: 2^(byte - 128), a NaN for 255. */
static inline float half_scale(uint8_t byte) {
    if (byte >= 2)
        return byte == 255 ? float_of(0x7fc00000u) : float_of((uint32_t)(byte - 1) << 23);
    return float_of(byte ? 0x00400000u : 0x00200000u);
}

/* Twice an E2M1 code's value, on eight-bit lanes: 0 1 2 3 4 6 8 12, negative from code 8 on. */
static inline int8_t twice_e2m1(uint8_t code) {
    uint8_t magnitude = code & 7;
    uint8_t above = (uint8_t)(magnitude > 4 ? magnitude - 4 : 0);
    uint8_t last = magnitude == 7 ? 2 : 0;
    uint8_t value = (uint8_t)(magnitude + above + last);
    uint8_t negative = code > 7 ? 0xff : 0;
    return (int8_t)(uint8_t)((value ^ negative) - negative);
}

/* `count` is rounded up to whole blocks of 32: the codes of the padding are there, `out` has room. */
static inline void decode_f4(const uint8_t *data, const uint8_t *scales, int count, float *restrict out) {
    uint8_t codes[BLOCK];
    int8_t values[BLOCK];
    int whole = (count + F4_BLOCK - 1) / F4_BLOCK * F4_BLOCK;
    for (int i = 0; i < whole / 2; i++) {
        codes[2 * i] = data[i] & 15;
        codes[2 * i + 1] = data[i] >> 4;
    }
    for (int i = 0; i < whole; i++)
        values[i] = twice_e2m1(codes[i]);
    for (int start = 0; start < whole; start += F4_BLOCK) {
        float scale = half_scale(scales[start / F4_BLOCK]);
        for (int i = 0; i < F4_BLOCK; i++)
            out[start + i] = (float)values[start + i] * scale;
    }
}

/* Elements from `at` on (a multiple of 32), padded with +0 to `size`, at most BLOCK. F8's scale is four bytes. */
static inline void decode(int format, const uint8_t *data, const uint8_t *scales, int64_t at, int count, int size,
                          float *restrict out) {
    float scale;
    switch (format) {
    case FORMAT_F32:
        memcpy(out, data + 4 * at, 4 * (size_t)count);
        break;
    case FORMAT_F16:
        decode_f16(data + 2 * at, count, out);
        break;
    case FORMAT_BF16:
        decode_bf16(data + 2 * at, count, out);
        break;
    case FORMAT_F8:
        memcpy(&scale, scales, sizeof scale);
        decode_f8(data + at, count, scale, out);
        break;
    default:
        decode_f4(data + at / 2, scales + at / F4_BLOCK, count, out);
    }
    if (count < size)
        memset(out + count, 0, 4 * (size_t)(size - count));
}

/* ---- from float32 ---- */

/* The largest magnitude's bits: those of a NaN where there is one. */
static inline uint32_t largest_bits(const float *values, int count) {
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        uint32_t magnitude = bits_of(values[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Whether some element is a NaN or an infinity. */
static inline int any_non_finite(const float *values, int count) {
    return largest_bits(values, count) >= 0x7f800000;
}

static inline void encode_f32(const float *values, int count, uint8_t *out) {
    for (int i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i]);
        bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000u : bits;
        memcpy(out + 4 * i, &bits, 4);
    }
}

static inline void encode_f16(const float *values, int count, uint8_t *out) {
    for (int i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i]), magnitude = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
        /* Wraps below 2^-14, where it is not used. */
        uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        /* float32's own rounding at 0.5, whose last place is 2^-24, leaves the code in the low bits. */
        uint32_t small = bits_of(float_of(magnitude < 0x38800000 ? magnitude : 0) + 0.5f) - 0x3f000000;
        uint32_t code = magnitude < 0x38800000 ? small : magnitude >= 0x47800000 ? 0x7c00 : normal;
        uint16_t half = (uint16_t)(magnitude > 0x7f800000 ? 0x7e00 : code | sign);
        memcpy(out + 2 * i, &half, 2);
    }
}

static inline void encode_bf16(const float *values, int count, uint8_t *out) {
    for (int i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i]);
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        uint16_t upper = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
        memcpy(out + 2 * i, &upper, 2);
    }
}

/* F8's scale exponent for a largest magnitude; INT32_MIN where all codes are zero. */
static inline int32_t f8_exponent(uint32_t largest) {
    int32_t field = (int32_t)(largest >> 23);
    if (field < 1)
        return INT32_MIN;
    return field - 134 > -126 ? field - 134 : -126;
}

/* A magnitude as a small format has it: its code, and its value. */
struct rounded {
    uint32_t code;
    float value;
};

/* Rounds a magnitude's bits to `mantissa` bits, ties to even; below 2^lowest there is one grid. Next to a number
 * 23 - mantissa binades above, float32 has no more bits left than that: adding it rounds, taking it off is exact. */
static inline struct rounded round_to(uint32_t magnitude, int mantissa, int lowest) {
    int32_t binade = (int32_t)(magnitude & 0x7f800000), least = (127 + lowest) << 23;
    binade = binade > least ? binade : least;
    uint32_t above = (uint32_t)(binade + ((23 - mantissa) << 23));
    float sum = float_of(magnitude) + float_of(above);
    uint32_t code = bits_of(sum) - above + ((uint32_t)(binade - least) >> (23 - mantissa));
    return (struct rounded){code, sum - float_of(above)};
}

/* E4M3 of a scaled value's bits; `most` is the largest magnitude that may be written. */
static inline struct rounded e4m3_of(uint32_t bits, int32_t most) {
    int32_t magnitude = (int32_t)(bits & 0x7fffffff);
    return round_to((uint32_t)(magnitude > most ? most : magnitude), 3, -6);
}

/* E2M1 of the bits of a scaled value below 8; 6 is the largest. */
static inline struct rounded e2m1_of(uint32_t bits) {
    int32_t magnitude = (int32_t)(bits & 0x7fffffff);
    return round_to((uint32_t)(magnitude > 0x40c00000 ? 0x40c00000 : magnitude), 1, 0);
}

/* The largest magnitude's bits that an F8 code may stand for: 240 where a larger one would pass float32. */
static inline int32_t f8_most(int32_t exponent) { return exponent == 120 ? 0x43700000 : 0x7fffffff; }

static inline void encode_f8(const float *values, int count, int32_t exponent, uint8_t *restrict out) {
    if (exponent == INT32_MIN) {
        memset(out, 0, (size_t)count);
        return;
    }
    float inverse = float_of((uint32_t)(127 - exponent) << 23);
    int32_t most = f8_most(exponent);
    for (int i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i] * inverse), code = e4m3_of(bits, most).code;
        out[i] = (uint8_t)(code | (code ? (bits >> 24) & 0x80 : 0));
    }
}

/* Codes and scales of `count` elements, zeros beyond them up to whole blocks of 32 (`values` has room for
 * them, and they are 0). Returns whether a NaN or an infinity was among them. */
static inline int encode_f4(const float *values, int count, uint8_t *restrict out, uint8_t *restrict scales) {
    uint8_t codes[BLOCK];
    int non_finite = 0, whole = (count + F4_BLOCK - 1) / F4_BLOCK * F4_BLOCK;
    for (int start = 0; start < whole; start += F4_BLOCK) {
        int32_t field = (int32_t)(largest_bits(values + start, F4_BLOCK) >> 23);
        non_finite |= field == 255;
        int32_t exponent = field < 1 ? 0 : field - 129 > -126 ? field - 129 : -126;
        float inverse = float_of((uint32_t)(127 - exponent) << 23);
        scales[start / F4_BLOCK] = (uint8_t)(exponent + 127);
        for (int i = start; i < start + F4_BLOCK; i++) {
            uint32_t bits = bits_of(values[i] * inverse), code = e2m1_of(bits).code;
            codes[i] = (uint8_t)(code | (code ? (bits >> 28) & 8 : 0));
        }
    }
    for (int i = 0; i < whole / 2; i++)
        out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    return non_finite;
}

#endif
