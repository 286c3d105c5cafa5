/* What the processor this runs on can do: asked of the baseline build, before another one is loaded. */
#include "formats.h"

/* 1 when the build with AVX2 may be used. */
EXPORT int deltapost_has_avx2(void) {
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
#else
    return 0;
#endif
}
