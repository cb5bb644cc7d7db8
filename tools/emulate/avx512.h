/* AVX-512 for a CPU that has AVX2 only: SIMD Everywhere (Debian's libsimde-dev) under Intel's names.
 *
 * KDA_EMULATE=avx512 makes setup.py compile isa_avx512.c, isa_avx512vnni.c and isa_avx512bf16.c with avx2's flags
 * and this header before them (isa_amx.c with amx.h, which includes this one), so that the tests run the logic of
 * those files (tails, masks, lane order, constants) where the instructions are missing. It shows nothing about speed,
 * and nothing about what the compiler makes of the intrinsics or of the inline assembly that the emulation leaves out.
 * Multiply-adds are the CPU's own FMA here, so they are rounded once, as in the original. */
#ifndef KDA_EMULATE_AVX512_H
#define KDA_EMULATE_AVX512_H
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "the emulation itself needs -mavx2 -mfma -mf16c: without them a multiply-add is rounded twice"
#endif

#include <immintrin.h>
#include <math.h>
#include <string.h>

#define SIMDE_NO_FAST_MATH
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#define __AVX512F__ 1 /* for the guards of the three files */
#define __AVX512VNNI__ 1
#ifdef HAVE_PAIRS
#define __AVX512BF16__ 1
#endif

/* No register holds 64 bytes, so there is none to keep a value in. */
#include "../../kda/_simd/lanes.h"
#undef KEEP
#define KEEP(x) (void)0
#undef FRESH
#define FRESH(x) (void)0
#define KDA_EMULATED

/* What SIMD Everywhere 0.7.4 lacks, or has only approximately. */

static inline __m512 kda_join(__m256 low, __m256 high) {
    float x[16];
    _mm256_storeu_ps(x, low);
    _mm256_storeu_ps(x + 8, high);
    return _mm512_loadu_ps(x);
}

static inline __m256 kda_half(__m512 x, int i) {
    float y[16];
    _mm512_storeu_ps(y, x);
    return _mm256_loadu_ps(y + 8 * i);
}

/* x * 2^floor(n), rounded once: SIMD Everywhere's own overflows at n = 128 and flushes subnormals. */
static inline __m512 kda_scalef(__m512 x, __m512 n) {
    float y[16], e[16];
    _mm512_storeu_ps(y, x);
    _mm512_storeu_ps(e, n);
    for (int i = 0; i < 16; i++)
        y[i] = isnan(e[i]) ? e[i] : ldexpf(y[i], (int)fmaxf(-999, fminf(999, floorf(e[i]))));
    return _mm512_loadu_ps(y);
}

/* Masked-out lanes are neither read nor written. */
static inline __m512 kda_maskz_loadu(unsigned mask, const float *p) {
    float y[16];
    for (int i = 0; i < 16; i++) y[i] = mask >> i & 1 ? p[i] : 0.0f;
    return _mm512_loadu_ps(y);
}

static inline void kda_mask_storeu(float *p, unsigned mask, __m512 x) {
    float y[16];
    _mm512_storeu_ps(y, x);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) p[i] = y[i];
}

static inline __m512 kda_cvtph(__m256i h) {
    return kda_join(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)));
}

static inline __m512i kda_cvtepu16(__m256i h) {
    uint16_t x[16];
    uint32_t y[16];
    _mm256_storeu_si256((__m256i *)(void *)x, h);
    for (int i = 0; i < 16; i++) y[i] = x[i];
    return _mm512_loadu_si512(y);
}

static inline __m256i kda_cvtepi32_16(__m512i x) {
    uint32_t y[16];
    uint16_t h[16];
    _mm512_storeu_si512(y, x);
    for (int i = 0; i < 16; i++) h[i] = (uint16_t)y[i];
    return _mm256_loadu_si256((const __m256i *)(const void *)h);
}

/* vpmaddubsw and vpmaddwd by AVX2's own, with their saturation. */
#define KDA_BY_HALVES(name, op) \
    static inline __m512i name(__m512i a, __m512i b) { \
        __m256i x[2], y[2]; \
        memcpy(x, &a, sizeof x); \
        memcpy(y, &b, sizeof y); \
        for (int i = 0; i < 2; i++) x[i] = op(x[i], y[i]); \
        return _mm512_loadu_si512(x); \
    }
KDA_BY_HALVES(kda_maddubs, _mm256_maddubs_epi16)
KDA_BY_HALVES(kda_madd, _mm256_madd_epi16)
#undef KDA_BY_HALVES

/* Out of range becomes -2^31, as in the original. */
static inline __m512i kda_cvtps_epi32(__m512 x) {
    int32_t y[16];
    for (int i = 0; i < 2; i++)
        _mm256_storeu_si256((__m256i *)(void *)(y + 8 * i), _mm256_cvtps_epi32(kda_half(x, i)));
    return _mm512_loadu_si512(y);
}

static inline __m512 kda_cvtepi32_ps(__m512i x) {
    int32_t y[16];
    float z[16];
    _mm512_storeu_si512(y, x);
    for (int i = 0; i < 16; i++) z[i] = (float)y[i];
    return _mm512_loadu_ps(z);
}

static inline __m128i kda_cvtepi32_8(__m512i x) {
    uint32_t y[16];
    uint8_t b[16];
    _mm512_storeu_si512(y, x);
    for (int i = 0; i < 16; i++) b[i] = (uint8_t)y[i];
    return _mm_loadu_si128((const __m128i *)(const void *)b);
}

/* AVX-512 BF16. The pairs of products are added in float32, one after the other, as the instruction does; that it
 * also flushes subnormals is left out. */
typedef __m512i kda_512bh;

static inline kda_512bh kda_cvtne2ps_pbh(__m512 high, __m512 low) {
    float x[32];
    uint16_t h[32];
    _mm512_storeu_ps(x, low);
    _mm512_storeu_ps(x + 16, high);
    for (int i = 0; i < 32; i++) {
        uint32_t b;
        memcpy(&b, x + i, sizeof b);
        h[i] = (uint16_t)(isnan(x[i]) ? b >> 16 | 0x40 : (b + 0x7fff + (b >> 16 & 1)) >> 16);
    }
    return _mm512_loadu_si512(h);
}

static inline __m512i kda_permutexvar_epi16(__m512i index, __m512i x) {
    uint16_t from[32], h[32], y[32];
    _mm512_storeu_si512(from, index);
    _mm512_storeu_si512(h, x);
    for (int i = 0; i < 32; i++) y[i] = h[from[i] & 31];
    return _mm512_loadu_si512(y);
}

static inline __m512 kda_dpbf16(__m512 sum, kda_512bh a, kda_512bh b) {
    uint32_t x[16], y[16];
    float z[16];
    _mm512_storeu_si512(x, a);
    _mm512_storeu_si512(y, b);
    _mm512_storeu_ps(z, sum);
    for (int i = 0; i < 16; i++)
        for (int shift = 0; shift <= 16; shift += 16) {
            uint32_t p = (x[i] >> shift & 0xffff) << 16, q = (y[i] >> shift & 0xffff) << 16;
            float u, v;
            memcpy(&u, &p, sizeof u);
            memcpy(&v, &q, sizeof v);
            z[i] += u * v;
        }
    return _mm512_loadu_ps(z);
}

#undef __m512bh
#undef _mm512_cvtne2ps_pbh
#undef _mm512_permutexvar_epi16
#undef _mm512_dpbf16_ps
#define __m512bh kda_512bh
#define _mm512_cvtne2ps_pbh(high, low) kda_cvtne2ps_pbh(high, low)
#define _mm512_permutexvar_epi16(index, x) kda_permutexvar_epi16(index, x)
#define _mm512_dpbf16_ps(sum, a, b) kda_dpbf16(sum, a, b)

#undef _mm512_scalef_ps
#undef _mm512_maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#undef _mm512_extractf32x8_ps
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_maddubs_epi16
#undef _mm512_madd_epi16
#undef _mm512_cvtps_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi32_epi8
#define _mm512_scalef_ps(x, n) kda_scalef(x, n)
#define _mm512_maskz_loadu_ps(mask, p) kda_maskz_loadu(mask, p)
#define _mm512_mask_storeu_ps(p, mask, x) kda_mask_storeu(p, mask, x)
#define _mm512_extractf32x8_ps(x, i) kda_half(x, i)
#define _mm512_cvtph_ps(h) kda_cvtph(h)
#define _mm512_cvtps_ph(x, mode) \
    _mm256_set_m128i(_mm256_cvtps_ph(kda_half(x, 1), mode), _mm256_cvtps_ph(kda_half(x, 0), mode))
#define _mm512_cvtepu16_epi32(h) kda_cvtepu16(h)
#define _mm512_cvtepi32_epi16(x) kda_cvtepi32_16(x)
#define _mm512_maddubs_epi16(a, b) kda_maddubs(a, b)
#define _mm512_madd_epi16(a, b) kda_madd(a, b)
#define _mm512_cvtps_epi32(x) kda_cvtps_epi32(x)
#define _mm512_cvtepi32_ps(x) kda_cvtepi32_ps(x)
#define _mm512_cvtepi32_epi8(x) kda_cvtepi32_8(x)

#endif
