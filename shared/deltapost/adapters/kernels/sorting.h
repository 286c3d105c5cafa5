/* Sorting float32 by their bits, many columns at a time: as numbers, -0 before +0, NaNs at the ends by their sign.
 *
 * A row is what one learner has in these columns. Nothing but the keys is kept, so memory is rows × columns × 4 bytes.
 */
#ifndef DELTAPOST_SORTING_H
#define DELTAPOST_SORTING_H

#include "formats.h"

/* An integer that grows with the float, and back. */
static inline int32_t key_of(float value) {
    int32_t bits = (int32_t)bits_of(value);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static inline float value_of(int32_t key) { return float_of((uint32_t)(key ^ ((key >> 31) & 0x7fffffff))); }

/* Columns that are sorted at a time, and with more than MANY learners: few enough that the keys of ten thousand
 * stay near a core's cache. Whole blocks of F4. */
enum { COLUMNS = 128, FEW_COLUMNS = F4_BLOCK, MANY = 2048 };

static int64_t columns_for(int64_t learners) { return learners > MANY ? FEW_COLUMNS : COLUMNS; }

/* Two learners' keys put in order, column by column. */
static inline void exchange(int32_t *restrict low, int32_t *restrict high, int columns) {
    for (int i = 0; i < columns; i++) {
        int32_t one = low[i], other = high[i];
        low[i] = one < other ? one : other;
        high[i] = one < other ? other : one;
    }
}

/* Sorts each column of keys[learners][columns], by Batcher's merge exchange (Knuth, The Art of Computer Programming
 * 3, 5.2.2, algorithm M). */
static inline void sort_columns(int32_t *keys, int64_t learners, int columns) {
    int64_t largest = 1;
    while (2 * largest < learners)
        largest *= 2;
    for (int64_t width = largest; width > 0; width /= 2) {
        int64_t reach = largest, bit = 0, distance = width;
        for (;;) {
            for (int64_t i = 0; i < learners - distance; i++)
                if ((i & width) == bit)
                    exchange(keys + i * columns, keys + (i + distance) * columns, columns);
            if (reach == width)
                break;
            distance = reach - width;
            reach /= 2;
            bit = width;
        }
    }
}

#endif
