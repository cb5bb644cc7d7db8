/* avx2: AVX2 + FMA + F16C, 8 float lanes, 16 registers.
 *
 *   instruction           Haswell .. Skylake               Zen 2, Zen 3
 *   vfmadd231ps ymm       latency 5 / 4, 2 per cycle       latency 5 / 4, 2 per cycle, pipes shared with vmulps
 *   vpmaddubsw, vpmaddwd  latency 5, 1 .. 2 per cycle      latency 3, 2 per cycle
 *   vdivps ymm            1 per 14 .. 5 cycles             1 per 5 cycles or so
 *   load, store ymm       2, 1 per cycle                   2, 1 per cycle
 *
 * Counts per vector of 8 elements, weights or values, and per multiply-add of a tile (benchmarks/counts.py, from the
 * disassembly); shares of what binds as kda bench records them on Zen 3, one thread (docs/performance.md):
 *
 *   loop                  multiplies  loads  stores  other   binds                       share
 *   step, read pass       2           1.5    0       0       multiply pipes in L1, then  0.47 of the pipes (2 MiB of S),
 *   step, write pass      2           1.5    1       0       the caches (32 bytes a      0.55 of an in-place pass
 *   step, pending update  4           2.25   1       0       cycle), then the memory     (40 MiB); pending 0.56, 0.66
 *   block, tile 6 x 2     1           0.67   0       0       multiply pipes              0.59 of their peak (a call)
 *   dense, tile 6 x 2     1           0.67   0       0       multiply pipes              not recorded
 *   dense, one token      1           1.25   0       0       reading the weights         not recorded
 *   conv, sums            4           9      1       1       loads                       with SiLU 0.24 of an in-place
 *   conv, SiLU            9           2      1       13      the pipes, a division       pass (1024 tokens)
 *   exp, sigmoid          11          2, 3   1       13, 18  pipes, a wait of 60 cycles  not recorded
 *   gated norm            12          5      1       11      the pipes, a division       0.77 of a copy
 *   idot q8, one token    2           3      0       3       reading the weights         0.86 to 0.96 of reading
 *   idot q8, four tokens  2           1.25   0       2.25    multiplies                  0.82 of the int8 peak
 *   idot q4, four tokens  2           1.25   0       1.5     multiplies                  1.04 of q8's peak
 *
 * idot: per vector of weights and token; q8 also turns signs (vpabsb, vpsignb), q4 splits nibbles.
 */
#ifndef __AVX2__
#error "isa_avx2.c needs -mavx2 -mfma -mf16c"
#endif
#include <immintrin.h>

#include "kernels.h"
#include "lanes.h"

#ifndef ISA_NAME /* isa_avxvnni.c includes this file under its own name */
#define ISA_NAME avx2
#endif
#define W 8
#define COLS 4
#define MR 6
#define NR 2
#define VECTOR "+x"
typedef __m256 f32xw;

/* Eight ones, eight zeros: the window at 8 - n is the mask of the first n lanes. */
static const int32_t mask_window_i32[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
KDA_INLINE __m256i first_lanes(ptrdiff_t n) {
    return _mm256_loadu_si256((const __m256i *)(const void *)(mask_window_i32 + 8 - n));
}

KDA_INLINE f32xw vkeep(f32xw x) {
    KEEP(x);
    return x;
}
KDA_INLINE void vprefetch(const char *p) { _mm_prefetch(p, _MM_HINT_T0); }
KDA_INLINE f32xw vload(const float *p) { return _mm256_loadu_ps(p); }
KDA_INLINE void vstore(float *p, f32xw x) { _mm256_storeu_ps(p, x); }
KDA_INLINE f32xw vload_n(const float *p, ptrdiff_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
KDA_INLINE void vstore_n(float *p, f32xw x, ptrdiff_t n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
KDA_INLINE f32xw vset1(float a) { return _mm256_set1_ps(a); }
KDA_INLINE f32xw vadd(f32xw a, f32xw b) { return _mm256_add_ps(a, b); }
KDA_INLINE f32xw vsub(f32xw a, f32xw b) { return _mm256_sub_ps(a, b); }
KDA_INLINE f32xw vmul(f32xw a, f32xw b) { return _mm256_mul_ps(a, b); }
KDA_INLINE f32xw vdiv(f32xw a, f32xw b) { return _mm256_div_ps(a, b); }
KDA_INLINE f32xw vsqrt(f32xw a) { return _mm256_sqrt_ps(a); }
KDA_INLINE f32xw vabs(f32xw a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
KDA_INLINE f32xw vnegabs(f32xw a) { return _mm256_or_ps(_mm256_set1_ps(-0.0f), a); }
KDA_INLINE f32xw vfma(f32xw a, f32xw b, f32xw c) { return _mm256_fmadd_ps(a, b, c); }
KDA_INLINE f32xw vfnma(f32xw a, f32xw b, f32xw c) { return _mm256_fnmadd_ps(a, b, c); }
KDA_INLINE f32xw vmin(f32xw a, f32xw b) { return _mm256_min_ps(a, b); } /* x86 returns b on NaN */
KDA_INLINE f32xw vmax(f32xw a, f32xw b) { return _mm256_max_ps(a, b); }
KDA_INLINE f32xw vround(f32xw a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KDA_INLINE f32xw vlt0(f32xw a, f32xw b, f32xw x, f32xw y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

/* 2^n as two halves, n >> 1 and the rest, each a normal exponent: the last multiplication rounds. */
KDA_INLINE f32xw vscale2(f32xw x, f32xw n) {
    __m256i n_i32 = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(n_i32, 1), one = _mm256_set1_epi32(127);
    __m256i e1 = _mm256_slli_epi32(_mm256_add_epi32(half, one), 23);
    __m256i e2 = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n_i32, half), one), 23);
    return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(e1)), _mm256_castsi256_ps(e2));
}

KDA_INLINE f32xw vscale2_normal(f32xw x, f32xw n) {
    __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
}

KDA_INLINE float vsum(f32xw x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
KDA_INLINE void vsum4(float *y, const f32xw x[4]) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

/* 4 x 4 transposes in both halves: lanes r and r + 4 of the columns come from rows r and r + 4. */
KDA_INLINE void transpose4(f32xw y[4], const f32xw x[4]) {
    f32xw a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]);
    f32xw c = _mm256_unpacklo_ps(x[2], x[3]), d = _mm256_unpackhi_ps(x[2], x[3]);
    y[0] = _mm256_shuffle_ps(a, c, 0x44), y[1] = _mm256_shuffle_ps(a, c, 0xee);
    y[2] = _mm256_shuffle_ps(b, d, 0x44), y[3] = _mm256_shuffle_ps(b, d, 0xee);
}
KDA_INLINE void vload4x(f32xw v[4], const float *p, ptrdiff_t s) {
    f32xw rows[4];
    UNROLL for (int r = 0; r < 4; r++) rows[r] =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + s * r)), _mm_loadu_ps(p + s * (r + 4)), 1);
    transpose4(v, rows);
}
/* Rows but the last as 4 floats, each over the end of the one before; the last as 2 and 1. */
KDA_INLINE void vstore3x(float *p, const f32xw v[3]) {
    f32xw columns[4] = {v[0], v[1], v[2], v[2]}, rows[4];
    transpose4(rows, columns);
    UNROLL for (int r = 0; r < 4; r++) _mm_storeu_ps(p + 3 * r, _mm256_castps256_ps128(rows[r]));
    UNROLL for (int r = 0; r < 3; r++) _mm_storeu_ps(p + 3 * (r + 4), _mm256_extractf128_ps(rows[r], 1));
    __m128 last = _mm256_extractf128_ps(rows[3], 1);
    _mm_storel_pi((__m64 *)(void *)(p + 21), last);
    _mm_store_ss(p + 23, _mm_movehl_ps(last, last));
}

KDA_INLINE f32xw vload_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
KDA_INLINE void vstore_f16(uint16_t *p, f32xw x) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
KDA_INLINE f32xw vload_bf16(const uint16_t *p) {
    __m128i h = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
/* Round to nearest even: add 0x7fff and the lowest kept bit; NaN: quiet it. The low halves are left as they are. */
KDA_INLINE __m256i rounded_up_bf16(f32xw x) {
    __m256i b = _mm256_castps_si256(x), low = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(b, _mm256_add_epi32(low, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_or_si256(b, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(up, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
KDA_INLINE f32xw vround_bf16(f32xw x) {
    return _mm256_castsi256_ps(_mm256_and_si256(rounded_up_bf16(x), _mm256_set1_epi32(-65536)));
}
KDA_INLINE void vstore_bf16(uint16_t *p, f32xw x) {
    __m256i top = _mm256_srli_epi32(rounded_up_bf16(x), 16);
    __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    _mm_storeu_si128((__m128i *)(void *)p, h);
}

/* ---- int8 ---- */

typedef __m256i i32xw;
#define IDOT_TOKENS 4
#ifdef HAVE_VNNI
#define Q8_BIAS 128
#else
#define Q8_BIAS 0
#endif

KDA_INLINE i32xw ivload(const void *p) { return _mm256_loadu_si256(p); }
KDA_INLINE i32xw ivset1(int32_t a) { return _mm256_set1_epi32(a); }
KDA_INLINE i32xw ivquad(const int8_t *p) {
    int32_t quad;
    memcpy(&quad, p, 4);
    return _mm256_set1_epi32(quad);
}
KDA_INLINE i32xw ivlow(i32xw w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
KDA_INLINE i32xw ivhigh(i32xw w) { return _mm256_and_si256(_mm256_srli_epi16(w, 4), _mm256_set1_epi8(15)); }
KDA_INLINE i32xw ivadd(i32xw a, i32xw b) { return _mm256_add_epi32(a, b); }
KDA_INLINE i32xw ivsub(i32xw a, i32xw b) { return _mm256_sub_epi32(a, b); }
KDA_INLINE f32xw ivtof(i32xw x) { return _mm256_cvtepi32_ps(x); }
KDA_INLINE void vtoi8(int8_t *p, f32xw x) {
    __m256i n = _mm256_cvtps_epi32(x);
    __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packs_epi16(h, h));
}
#ifdef HAVE_VNNI
KDA_INLINE i32xw ivdot_q4(i32xw c, i32xw u, i32xw a) { return _mm256_dpbusd_avx_epi32(c, u, a); }
KDA_INLINE i32xw ivdot_q8(i32xw c, i32xw w, i32xw a) { return ivdot_q4(c, w, a); }
#else
/* vpmaddubsw adds two products u8 x s8 with saturation at 32767: 2 * 128 * 127 = 32512 stays below, so |w| with a's
 * sign turned is exact, and nibbles are. */
KDA_INLINE i32xw ivdot_q4(i32xw c, i32xw u, i32xw a) {
    i32xw four = _mm256_madd_epi16(_mm256_maddubs_epi16(u, a), _mm256_set1_epi16(1));
#if defined(_MSC_VER) || defined(KDA_EMULATED)
    return _mm256_add_epi32(c, four);
#else /* gcc adds several steps up first, in more sums than there are registers */
    __asm__("vpaddd %1, %0, %0" : "+x"(c) : "x"(four));
    return c;
#endif
}
KDA_INLINE i32xw ivdot_q8(i32xw c, i32xw w, i32xw a) {
    return ivdot_q4(c, _mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
}
#endif

#include "math.inc"
#include "probe.inc"
#include "step.inc"
#include "block.inc"
#include "dense.inc"
#include "backward.inc"
#include "epilogue.inc"
#include "idot.inc"
#include "table.inc"
