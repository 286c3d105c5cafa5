/* STREAM's triad: what moving memory costs on this machine, against which benchmarks hold what they measure. */
#include <stdint.h>

void deltapost_triad(float *restrict a, const float *restrict b, const float *restrict c, float factor,
                     int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        a[i] = b[i] + factor * c[i];
}
