/* The reduction tree over one block: products in float32, then halves added, 2048 apart first, 1 apart last. */
#ifndef DELTAPOST_TREE_H
#define DELTAPOST_TREE_H

#include "formats.h"

enum { EIGHTH = BLOCK / 8 };

/* t[i] <- t[i] + t[i + width], written out so that each width is a loop of constant length. */
#define HALVE(t, width)                 \
    for (int i = 0; i < (width); i++)   \
        (t)[i] = (t)[i] + (t)[i + (width)]

/* The sum of a[i]·b[i] over a whole block, each padded with +0. */
static inline float tree_dot(const float *restrict a, const float *restrict b) {
    float t[EIGHTH];
    /* The levels of 2048, 1024 and 512 at once: each element of the level of 512 is made of eight products. */
    for (int i = 0; i < EIGHTH; i++) {
        float first = a[i] * b[i] + a[i + 4 * EIGHTH] * b[i + 4 * EIGHTH];
        float second = a[i + 2 * EIGHTH] * b[i + 2 * EIGHTH] + a[i + 6 * EIGHTH] * b[i + 6 * EIGHTH];
        float third = a[i + EIGHTH] * b[i + EIGHTH] + a[i + 5 * EIGHTH] * b[i + 5 * EIGHTH];
        float fourth = a[i + 3 * EIGHTH] * b[i + 3 * EIGHTH] + a[i + 7 * EIGHTH] * b[i + 7 * EIGHTH];
        t[i] = (first + second) + (third + fourth);
    }
    HALVE(t, 256);
    HALVE(t, 128);
    HALVE(t, 64);
    HALVE(t, 32);
    HALVE(t, 16);
    HALVE(t, 8);
    HALVE(t, 4);
    HALVE(t, 2);
    return t[0] + t[1];
}

#endif
