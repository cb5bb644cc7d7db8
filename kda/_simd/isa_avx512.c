/* avx512: AVX-512 F, BW, VL, DQ, 16 float lanes, 32 registers, masked tails.
 *
 *   instruction        Skylake-X .. Sapphire Rapids               Zen 4
 *   vfmadd231ps zmm    latency 4, 2 per cycle (1 on some parts)   latency 4, 1 per cycle (two halves)
 *   load, store zmm    2, 1 per cycle                             1, 1 per 2 cycles
 *   vscalefps zmm      latency 4: ldexp with the rounding and the subnormals done by the hardware
 *
 * Counts per vector of 16 elements, weights or values, and per multiply-add of a tile (benchmarks/counts.py, from the
 * disassembly). No share is known: not timed.
 *
 *   loop                   multiplies  loads  stores  other   binds
 *   step, read pass        2           1.25   0       0       multiply pipes, while caches give 64 bytes a cycle;
 *   step, write pass       2           1.25   1       0       the memory after that
 *   step, pending update   4           1.5    1       0
 *   block, tile 8 x 2      1           0.63   0       0       multiply pipes: 8 cycles of 16 on two, llvm-mca says 9
 *   dense, tile 8 x 2      1           0.63   0       0       multiply pipes
 *   dense, one token       1           1.25   0       0       reading the weights
 *   conv, sums             4           9      1       1       loads
 *   conv, SiLU             9           1      1       10      the pipes, a division of 10 to 16 cycles
 *   exp, sigmoid           9           1, 2   1       7, 11   the pipes
 *   idot q8, one token     2           3      0       6       reading the weights
 *   idot q8, 12 tokens     2           1.2    0       2.3     pipes of vpmaddubsw and vpmaddwd
 *
 * With V <= 128 the step's COLS = 8 vectors are the whole row, so S is read in plain order. Without VNNI a's signs are
 * turned under a mask, then vpmaddubsw, vpmaddwd, vpaddd as on avx2.
 *
 * Nothing here has been timed: no machine with AVX-512 was at hand. The instructions have been run, emulated.
 */
#ifndef __AVX512F__
#error "isa_avx512.c needs -mavx512f -mavx512bw -mavx512vl -mavx512dq"
#endif
#include <immintrin.h>

#include "kernels.h"
#include "lanes.h"

#ifndef ISA_NAME /* isa_avx512vnni.c and isa_avx512bf16.c include this file under their own names */
#define ISA_NAME avx512
#endif
#define W 16
#define COLS 8
#define MR 8
#define NR 2
#define VECTOR "+v"
typedef __m512 f32xw;

KDA_INLINE __mmask16 first_lanes(ptrdiff_t n) { return (__mmask16)((1u << n) - 1u); }

KDA_INLINE f32xw vkeep(f32xw x) {
    KEEP(x);
    return x;
}
KDA_INLINE void vprefetch(const char *p) { _mm_prefetch(p, _MM_HINT_T0); }
KDA_INLINE f32xw vload(const float *p) { return _mm512_loadu_ps(p); }
KDA_INLINE void vstore(float *p, f32xw x) { _mm512_storeu_ps(p, x); }
KDA_INLINE f32xw vload_n(const float *p, ptrdiff_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
KDA_INLINE void vstore_n(float *p, f32xw x, ptrdiff_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
KDA_INLINE f32xw vset1(float a) { return _mm512_set1_ps(a); }
KDA_INLINE f32xw vadd(f32xw a, f32xw b) { return _mm512_add_ps(a, b); }
KDA_INLINE f32xw vsub(f32xw a, f32xw b) { return _mm512_sub_ps(a, b); }
KDA_INLINE f32xw vmul(f32xw a, f32xw b) { return _mm512_mul_ps(a, b); }
KDA_INLINE f32xw vdiv(f32xw a, f32xw b) { return _mm512_div_ps(a, b); }
KDA_INLINE f32xw vsqrt(f32xw a) { return _mm512_sqrt_ps(a); }
KDA_INLINE f32xw vabs(f32xw a) { return _mm512_abs_ps(a); }
KDA_INLINE f32xw vnegabs(f32xw a) { return _mm512_or_ps(_mm512_set1_ps(-0.0f), a); }
KDA_INLINE f32xw vfma(f32xw a, f32xw b, f32xw c) { return _mm512_fmadd_ps(a, b, c); }
KDA_INLINE f32xw vfnma(f32xw a, f32xw b, f32xw c) { return _mm512_fnmadd_ps(a, b, c); }
KDA_INLINE f32xw vmin(f32xw a, f32xw b) { return _mm512_min_ps(a, b); } /* x86 returns b on NaN */
KDA_INLINE f32xw vmax(f32xw a, f32xw b) { return _mm512_max_ps(a, b); }
KDA_INLINE f32xw vround(f32xw a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KDA_INLINE f32xw vlt0(f32xw a, f32xw b, f32xw x, f32xw y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
KDA_INLINE f32xw vscale2(f32xw x, f32xw n) { return _mm512_scalef_ps(x, n); }

KDA_INLINE f32xw vscale2_normal(f32xw x, f32xw n) { return _mm512_scalef_ps(x, n); }

KDA_INLINE float vsum(f32xw x) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
KDA_INLINE __m256 halves_sum(f32xw x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}
KDA_INLINE void vsum4(float *y, const f32xw x[4]) {
    __m256 s01 = _mm256_hadd_ps(halves_sum(x[0]), halves_sum(x[1]));
    __m256 s = _mm256_hadd_ps(s01, _mm256_hadd_ps(halves_sum(x[2]), halves_sum(x[3])));
    _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

/* 4 x 4 transposes in the four quarters: lane r of the columns comes from row r. */
KDA_INLINE void transpose4(f32xw y[4], const f32xw x[4]) {
    f32xw a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    f32xw c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    y[0] = _mm512_shuffle_ps(a, c, 0x44), y[1] = _mm512_shuffle_ps(a, c, 0xee);
    y[2] = _mm512_shuffle_ps(b, d, 0x44), y[3] = _mm512_shuffle_ps(b, d, 0xee);
}
KDA_INLINE void vload4x(f32xw v[4], const float *p, ptrdiff_t s) {
    f32xw rows[4];
    UNROLL for (int r = 0; r < 4; r++) {
        rows[r] = _mm512_castps128_ps512(_mm_loadu_ps(p + s * r));
        rows[r] = _mm512_insertf32x4(rows[r], _mm_loadu_ps(p + s * (r + 4)), 1);
        rows[r] = _mm512_insertf32x4(rows[r], _mm_loadu_ps(p + s * (r + 8)), 2);
        rows[r] = _mm512_insertf32x4(rows[r], _mm_loadu_ps(p + s * (r + 12)), 3);
    }
    transpose4(v, rows);
}
/* Rows but the last as 4 floats, each over the end of the one before; the last as 2 and 1. */
KDA_INLINE void vstore3x(float *p, const f32xw v[3]) {
    f32xw columns[4] = {v[0], v[1], v[2], v[2]}, rows[4];
    transpose4(rows, columns);
    UNROLL for (int r = 0; r < 4; r++) _mm_storeu_ps(p + 3 * r, _mm512_castps512_ps128(rows[r]));
    UNROLL for (int r = 0; r < 4; r++) _mm_storeu_ps(p + 3 * (r + 4), _mm512_extractf32x4_ps(rows[r], 1));
    UNROLL for (int r = 0; r < 4; r++) _mm_storeu_ps(p + 3 * (r + 8), _mm512_extractf32x4_ps(rows[r], 2));
    UNROLL for (int r = 0; r < 3; r++) _mm_storeu_ps(p + 3 * (r + 12), _mm512_extractf32x4_ps(rows[r], 3));
    __m128 last = _mm512_extractf32x4_ps(rows[3], 3);
    _mm_storel_pi((__m64 *)(void *)(p + 45), last);
    _mm_store_ss(p + 47, _mm_movehl_ps(last, last));
}

KDA_INLINE f32xw vload_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
KDA_INLINE void vstore_f16(uint16_t *p, f32xw x) {
    __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256((__m256i *)(void *)p, h);
}
KDA_INLINE f32xw vload_bf16(const uint16_t *p) {
    __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
/* Round to nearest even: add 0x7fff and the lowest kept bit; NaN: quiet it. The low halves are left as they are. */
KDA_INLINE __m512i rounded_up_bf16(f32xw x) {
    __m512i b = _mm512_castps_si512(x), low = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(b, _mm512_add_epi32(low, _mm512_set1_epi32(0x7fff)));
    __m512i nan = _mm512_or_si512(b, _mm512_set1_epi32(0x400000));
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), up, nan);
}
KDA_INLINE f32xw vround_bf16(f32xw x) {
    return _mm512_castsi512_ps(_mm512_and_si512(rounded_up_bf16(x), _mm512_set1_epi32(-65536)));
}
KDA_INLINE void vstore_bf16(uint16_t *p, f32xw x) {
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_up_bf16(x), 16)));
}

#if HAVE_PAIRS
/* vcvtne2ps2bf16 puts its second operand in the low 16 words, its first in the high 16. */
KDA_INLINE f32xw vpair(f32xw x, f32xw y) {
    static const uint16_t zip[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(y, x);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_loadu_si512(zip), halves));
}
KDA_INLINE void vpair_along(float *y, const float *x, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i += 2 * W) {
        ptrdiff_t left = n - i;
        f32xw low = left < W ? vload_n(x + i, left) : vload(x + i);
        f32xw high = left <= W ? vset1(0.0f) : left < 2 * W ? vload_n(x + i + W, left - W) : vload(x + i + W);
        f32xw pairs = (f32xw)_mm512_cvtne2ps_pbh(high, low);
        if (left < 2 * W)
            vstore_n(y + i / 2, pairs, (left + 1) / 2);
        else
            vstore(y + i / 2, pairs);
    }
}
KDA_INLINE f32xw vdot_pairs(f32xw a, f32xw b, f32xw c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#endif

/* ---- int8 ---- */

typedef __m512i i32xw;
#if HAVE_TILES
#define IDOT_TOKENS 16
#else
#define IDOT_TOKENS 12
#endif
#ifdef HAVE_VNNI
#define Q8_BIAS 128
#else
#define Q8_BIAS 0
#endif

KDA_INLINE i32xw ivload(const void *p) { return _mm512_loadu_si512(p); }
KDA_INLINE i32xw ivset1(int32_t a) { return _mm512_set1_epi32(a); }
KDA_INLINE i32xw ivquad(const int8_t *p) {
    int32_t quad;
    memcpy(&quad, p, 4);
    return _mm512_set1_epi32(quad);
}
KDA_INLINE i32xw ivlow(i32xw w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
KDA_INLINE i32xw ivhigh(i32xw w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15)); }
KDA_INLINE i32xw ivadd(i32xw a, i32xw b) { return _mm512_add_epi32(a, b); }
KDA_INLINE i32xw ivsub(i32xw a, i32xw b) { return _mm512_sub_epi32(a, b); }
KDA_INLINE f32xw ivtof(i32xw x) { return _mm512_cvtepi32_ps(x); }
KDA_INLINE void vtoi8(int8_t *p, f32xw x) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
#ifdef HAVE_VNNI
KDA_INLINE i32xw ivdot_q4(i32xw c, i32xw u, i32xw a) {
#if defined(_MSC_VER) || defined(KDA_EMULATED)
    return _mm512_dpbusd_epi32(c, u, a);
#else /* tied to its register: gcc 12 copies and spills the sums of the intrinsic */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(u), "v"(a));
    return c;
#endif
}
KDA_INLINE i32xw ivdot_q8(i32xw c, i32xw w, i32xw a) { return ivdot_q4(c, w, a); }
#else
/* vpmaddubsw adds two products u8 x s8 with saturation at 32767: 2 * 128 * 127 = 32512 stays below, so |w| with a's
 * sign turned is exact, and nibbles are. */
KDA_INLINE i32xw ivdot_q4(i32xw c, i32xw u, i32xw a) {
    i32xw four = _mm512_madd_epi16(_mm512_maddubs_epi16(u, a), _mm512_set1_epi16(1));
#if defined(_MSC_VER) || defined(KDA_EMULATED)
    return _mm512_add_epi32(c, four);
#else /* gcc adds several steps up first, in more sums than there are registers */
    __asm__("vpaddd %1, %0, %0" : "+v"(c) : "v"(four));
    return c;
#endif
}
KDA_INLINE i32xw ivdot_q8(i32xw c, i32xw w, i32xw a) {
    i32xw turned = _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(w), _mm512_setzero_si512(), a);
    return ivdot_q4(c, _mm512_abs_epi8(w), turned);
}
#endif

#include "math.inc"
#include "probe.inc"
#include "step.inc"
#if HAVE_TILES
#include "tiles.inc"
#endif
#include "block.inc"
#include "dense.inc"
#include "backward.inc"
#include "epilogue.inc"
#include "idot.inc"
#include "table.inc"
