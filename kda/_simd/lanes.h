/* The lane words. Each SIMD file defines these before it includes the .inc files, which are
 * written in nothing else, so that an algorithm stands once and runs at every width.
 *
 *   W                      float lanes in a vector
 *   f32xw                  W floats
 *   vload(p) vstore(p, x)  W floats, any address
 *   vload_n(p, n)          n < W floats, the other lanes 0; touches nothing past n
 *   vstore_n(p, x, n)
 *   vset1(a)               a in every lane
 *   vadd vsub vmul vdiv vsqrt vabs
 *   vfma(a, b, c)          a * b + c, rounded once;  vfnma(a, b, c): c - a * b
 *   vmin(a, b) vmax(a, b)  where b is NaN the result is NaN
 *   vround(x)              nearest integer, ties to even
 *   vscale2(x, n)          x * 2^n; n holds integers in [-150, 128]; overflow and underflow as ldexp
 *   vscale2_normal(x, n)   the same where x and the result are normal numbers
 *   vnegabs(x)             -|x|
 *   vlt0(a, b, x, y)       a < b ? x : y
 *   vsum(x)                the sum of the lanes, in one fixed order
 *   vsum4(y, x)            y[0..3] = the sums of the lanes of x[0..3], each in the same fixed order
 *   vload_f16(p) vload_bf16(p) vstore_f16(p, x) vstore_bf16(p, x)     W halves
 *   vload4x(v, p, s)       v[i] lane r = p[s * r + i], i < 4: W rows of 4 floats, `s` apart, as columns
 *   vstore3x(p, v)         the way back from v[0..2] to W rows of 3 floats, and not a byte more
 *   vround_bf16(x)         x rounded to bfloat16, as floats
 *   vkeep(x)               x, held in a register: the compiler may not load it again for its next use
 *   vprefetch(p)           ask for the line at p; any address will do
 *   COLS                   vectors of a row whose sums stay in registers in the step (4 or 8)
 *   MR, NR                 rows and vectors of a tile of sums in the block (MR * NR + NR + 1 registers)
 */
#ifndef KDA_LANES_H
#define KDA_LANES_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER) && !defined(__clang__)
#define KDA_INLINE static __forceinline
#define KEEP(x) (void)0
#define FRESH(x) (void)0
#else
#define KDA_INLINE static inline __attribute__((always_inline))
#define KEEP(x) __asm__("" : VECTOR(x))           /* VECTOR: the constraint of a vector register */
#define FRESH(x) __asm__ volatile("" : VECTOR(x)) /* as if x had just been computed */
#endif

/* HAVE_PAIRS: the ISA multiplies pairs of bfloat16 and defines
 *   vpair(x, y)            lane i: bfloat16(x[i]) low, bfloat16(y[i]) high, each rounded to nearest even
 *   vpair_along(y, x, n)   n floats as (n + 1) / 2 such pairs of neighbours, an odd one with 0
 *   vdot_pairs(a, b, c)    c + a.low * b.low + a.high * b.high in float32 */
#ifndef HAVE_PAIRS
#define HAVE_PAIRS 0
#endif
/* HAVE_TILES: it multiplies whole tiles of such pairs and of bytes, see tiles.inc. */
#ifndef HAVE_TILES
#define HAVE_TILES 0
#endif

/* Before a loop of constant, small count: unroll it whole, or its arrays of vectors live on the stack. */
#if defined(_MSC_VER) && !defined(__clang__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

/* n elements in steps of W: BODY(i, W) for the whole vectors, then once BODY(i, what is left).
 * The compiler sees the constant in the first call, so the tail's masks cost the main loop nothing. */
#define FOR_LANES(i, n, BODY) \
    do { \
        ptrdiff_t i = 0; \
        for (; i + W <= (n); i += W) BODY(i, W); \
        if (i < (n)) BODY(i, (n) - i); \
    } while (0)

#endif
