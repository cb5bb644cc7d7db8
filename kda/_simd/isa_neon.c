/* neon: Advanced SIMD of ARMv8.0, 4 float lanes, 32 registers.
 *
 *   instruction, latency and per cycle   Cortex-A53   Cortex-A76   Neoverse N1/V1, Apple M
 *   fmla 4s                              4-8, 1       4, 2         4, 2 / 4
 *   ldr q, str q per cycle               1, 1         2, 1..2      2..3, 2
 *
 * Counts per vector of 4 elements or values, per vector of weights (and token), and per multiply-add of a tile
 * (benchmarks/counts.py, from the disassembly; docs/performance.md sets them beside avx2's). ldp counts twice.
 *
 *   loop                   multiplies  loads  stores  other   binds
 *   step, read pass        2           1.25   0       0       multiply pipes in L1, then the memory
 *   step, write pass       2           1.25   1       0.4
 *   step, pending update   4           1.5    1       0
 *   block, tile 8 x 2      1           0.63   0       0       multiply pipes, at their bound by llvm-mca (N1, V1)
 *   dense, tile 8 x 2      1           0.63   0       0       multiply pipes
 *   dense, one token       1           1.6    0       0       reading the weights
 *   conv, sums             4           9      1       1       loads
 *   conv, SiLU             9           1      1       12      the pipes, a division
 *   exp, sigmoid           11          1      1       13, 19  the pipes
 *   idot q8, one token     3           2      0       1.8     reading the weights; two smull, addp, sadalp
 *   idot q8, 8 tokens      3           1.3    0.2     2       the multiply pipes; a few sums spill
 *
 * Not timed: so far it has run emulated only.
 */
#if !defined(__ARM_NEON) && !defined(_M_ARM64)
#error "isa_neon.c needs Advanced SIMD"
#endif
#include <arm_neon.h>

#include "kernels.h"
#include "lanes.h"

#ifndef ISA_NAME /* isa_dotprod.c and isa_i8mm.c include this file under their own names */
#define ISA_NAME neon
#endif
#define W 4
#define COLS 8
#define MR 8
#define NR 2
#define VECTOR "+w"
typedef float32x4_t f32xw;

KDA_INLINE f32xw vkeep(f32xw x) {
    KEEP(x);
    return x;
}
KDA_INLINE void vprefetch(const char *p) { __builtin_prefetch(p); }
KDA_INLINE f32xw vload(const float *p) { return vld1q_f32(p); }
KDA_INLINE void vstore(float *p, f32xw x) { vst1q_f32(p, x); }
KDA_INLINE f32xw vload_n(const float *p, ptrdiff_t n) {
    float lanes[4] = {0};
    for (ptrdiff_t i = 0; i < n; i++) lanes[i] = p[i];
    return vld1q_f32(lanes);
}
KDA_INLINE void vstore_n(float *p, f32xw x, ptrdiff_t n) {
    float lanes[4];
    vst1q_f32(lanes, x);
    for (ptrdiff_t i = 0; i < n; i++) p[i] = lanes[i];
}
KDA_INLINE f32xw vset1(float a) { return vdupq_n_f32(a); }
KDA_INLINE f32xw vadd(f32xw a, f32xw b) { return vaddq_f32(a, b); }
KDA_INLINE f32xw vsub(f32xw a, f32xw b) { return vsubq_f32(a, b); }
KDA_INLINE f32xw vmul(f32xw a, f32xw b) { return vmulq_f32(a, b); }
KDA_INLINE f32xw vdiv(f32xw a, f32xw b) { return vdivq_f32(a, b); }
KDA_INLINE f32xw vsqrt(f32xw a) { return vsqrtq_f32(a); }
KDA_INLINE f32xw vabs(f32xw a) { return vabsq_f32(a); }
KDA_INLINE f32xw vnegabs(f32xw a) { return vnegq_f32(vabsq_f32(a)); }
KDA_INLINE f32xw vfma(f32xw a, f32xw b, f32xw c) { return vfmaq_f32(c, a, b); }
KDA_INLINE f32xw vfnma(f32xw a, f32xw b, f32xw c) { return vfmsq_f32(c, a, b); }
KDA_INLINE f32xw vmin(f32xw a, f32xw b) { return vminq_f32(a, b); } /* NaN wins on Arm */
KDA_INLINE f32xw vmax(f32xw a, f32xw b) { return vmaxq_f32(a, b); }
KDA_INLINE f32xw vround(f32xw a) { return vrndnq_f32(a); }
KDA_INLINE f32xw vlt0(f32xw a, f32xw b, f32xw x, f32xw y) { return vbslq_f32(vcltq_f32(a, b), x, y); }

/* 2^n as two halves, n >> 1 and the rest, each a normal exponent: the last multiplication rounds. */
KDA_INLINE f32xw vscale2(f32xw x, f32xw n) {
    int32x4_t n_i32 = vcvtq_s32_f32(n), half = vshrq_n_s32(n_i32, 1), one = vdupq_n_s32(127);
    int32x4_t e1 = vshlq_n_s32(vaddq_s32(half, one), 23);
    int32x4_t e2 = vshlq_n_s32(vaddq_s32(vsubq_s32(n_i32, half), one), 23);
    return vmulq_f32(vmulq_f32(x, vreinterpretq_f32_s32(e1)), vreinterpretq_f32_s32(e2));
}

KDA_INLINE f32xw vscale2_normal(f32xw x, f32xw n) {
    int32x4_t exponent = vshlq_n_s32(vcvtq_s32_f32(n), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), exponent));
}

KDA_INLINE float vsum(f32xw x) { return vaddvq_f32(x); }
KDA_INLINE void vsum4(float *y, const f32xw x[4]) {
    vst1q_f32(y, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
}

KDA_INLINE void transpose4(f32xw y[4], const f32xw x[4]) {
    float64x2_t a = vreinterpretq_f64_f32(vzip1q_f32(x[0], x[1])),
                b = vreinterpretq_f64_f32(vzip2q_f32(x[0], x[1]));
    float64x2_t c = vreinterpretq_f64_f32(vzip1q_f32(x[2], x[3])),
                d = vreinterpretq_f64_f32(vzip2q_f32(x[2], x[3]));
    y[0] = vreinterpretq_f32_f64(vzip1q_f64(a, c)), y[1] = vreinterpretq_f32_f64(vzip2q_f64(a, c));
    y[2] = vreinterpretq_f32_f64(vzip1q_f64(b, d)), y[3] = vreinterpretq_f32_f64(vzip2q_f64(b, d));
}
KDA_INLINE void vload4x(f32xw v[4], const float *p, ptrdiff_t s) {
    f32xw rows[4];
    UNROLL for (int r = 0; r < 4; r++) rows[r] = vld1q_f32(p + s * r);
    transpose4(v, rows);
}
KDA_INLINE void vstore3x(float *p, const f32xw v[3]) {
    float32x4x3_t columns = {{v[0], v[1], v[2]}};
    vst3q_f32(p, columns);
}

/* float16 through its own instructions, on the bits: no compiler's half type is needed. */
KDA_INLINE f32xw vload_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
KDA_INLINE void vstore_f16(uint16_t *p, f32xw x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
KDA_INLINE f32xw vload_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
/* Round to nearest even: add 0x7fff and the lowest kept bit; NaN: quiet it. The low halves are left as they are. */
KDA_INLINE uint32x4_t rounded_up_bf16(f32xw x) {
    uint32x4_t b = vreinterpretq_u32_f32(x), low = vandq_u32(vshrq_n_u32(b, 16), vdupq_n_u32(1));
    uint32x4_t up = vaddq_u32(b, vaddq_u32(low, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(x, x), up, vorrq_u32(b, vdupq_n_u32(0x400000)));
}
KDA_INLINE f32xw vround_bf16(f32xw x) {
    return vreinterpretq_f32_u32(vandq_u32(rounded_up_bf16(x), vdupq_n_u32(0xffff0000)));
}
KDA_INLINE void vstore_bf16(uint16_t *p, f32xw x) { vst1_u16(p, vshrn_n_u32(rounded_up_bf16(x), 16)); }

/* ---- int8 ---- */

typedef int32x4_t i32xw;
#define IDOT_TOKENS 8
#define Q8_BIAS 0

KDA_INLINE i32xw ivload(const void *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
KDA_INLINE i32xw ivset1(int32_t a) { return vdupq_n_s32(a); }
KDA_INLINE i32xw ivquad(const int8_t *p) {
    int32_t quad;
    memcpy(&quad, p, 4);
    return vdupq_n_s32(quad);
}
KDA_INLINE i32xw ivlow(i32xw w) { return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(w), vdupq_n_u8(15))); }
KDA_INLINE i32xw ivhigh(i32xw w) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(w), 4)); }
KDA_INLINE i32xw ivadd(i32xw a, i32xw b) { return vaddq_s32(a, b); }
KDA_INLINE i32xw ivsub(i32xw a, i32xw b) { return vsubq_s32(a, b); }
KDA_INLINE f32xw ivtof(i32xw x) { return vcvtq_f32_s32(x); }
KDA_INLINE void vtoi8(int8_t *p, f32xw x) {
    int16x4_t h = vmovn_s32(vcvtnq_s32_f32(x));
    int8x8_t b = vmovn_s16(vcombine_s16(h, h));
    vst1_lane_s32((int32_t *)(void *)p, vreinterpret_s32_s8(b), 0);
}
#ifdef HAVE_DOTPROD
KDA_INLINE i32xw ivdot_q8(i32xw c, i32xw w, i32xw a) {
    return vdotq_s32(c, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(a));
}
#else
/* Products in int16, added in pairs there (2 * 128 * 127 = 32512 fits), then pairs of those into int32. */
KDA_INLINE i32xw ivdot_q8(i32xw c, i32xw w, i32xw a) {
    int8x16_t x = vreinterpretq_s8_s32(w), y = vreinterpretq_s8_s32(a);
    int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
    return vpadalq_s16(c, vpaddq_s16(low, high));
}
#endif
KDA_INLINE i32xw ivdot_q4(i32xw c, i32xw u, i32xw a) { return ivdot_q8(c, u, a); }
#ifdef HAVE_I8MM
/* smmla: c, 2 x 2, plus two rows of eight bytes times two columns of eight. Rows of weights meet tokens two by two,
 * whose codes lie by eights, and the sums of a token are put together once per group. */
#define IDOT_FULL_GROUP
#define IDOT_RUN 8
#define PEAK_MACS 32
KDA_INLINE i32xw ivpeak(i32xw c, i32xw w, i32xw a) {
    return vmmlaq_s32(c, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(a));
}
KDA_INLINE void idot_full_group(i32xw *acc, const uint8_t *codes, const int8_t *x, ptrdiff_t group, int bits) {
    for (ptrdiff_t i = 0; i < group; i += 8, codes += bits * W, x += 8 * IDOT_TOKENS) {
        i32xw both = ivload(codes), first = bits == 8 ? both : ivlow(both);
        i32xw second = bits == 8 ? ivload(codes + 4 * W) : ivhigh(both);
        i32xw rows01 = vzip1q_s32(first, second), rows23 = vzip2q_s32(first, second);
        UNROLL for (int t = 0; t < IDOT_TOKENS; t += 4) {
            i32xw tokens01 = ivload(x + 8 * t), tokens23 = ivload(x + 8 * t + 16);
            acc[t] = ivpeak(acc[t], rows01, tokens01);
            acc[t + 1] = ivpeak(acc[t + 1], rows23, tokens01);
            acc[t + 2] = ivpeak(acc[t + 2], rows01, tokens23);
            acc[t + 3] = ivpeak(acc[t + 3], rows23, tokens23);
        }
    }
    UNROLL for (int t = 0; t < IDOT_TOKENS; t += 2) {
        i32xw rows01 = acc[t], rows23 = acc[t + 1];
        acc[t] = vuzp1q_s32(rows01, rows23);
        acc[t + 1] = vuzp2q_s32(rows01, rows23);
    }
}
#elif defined(HAVE_DOTPROD)
/* sdot takes the quad of a token from a lane: a load for four tokens, and nothing to broadcast. */
#define IDOT_FULL_GROUP
#define PEAK_MACS 16
#define ivpeak ivdot_q8
KDA_INLINE void ivdot_lanes(i32xw *acc, i32xw w, const int8_t *x) {
    int8x16_t rows = vreinterpretq_s8_s32(w);
    UNROLL for (int t = 0; t < IDOT_TOKENS; t += 4) {
        int8x16_t quads = vld1q_s8(x + 4 * t);
        acc[t] = vdotq_laneq_s32(acc[t], rows, quads, 0);
        acc[t + 1] = vdotq_laneq_s32(acc[t + 1], rows, quads, 1);
        acc[t + 2] = vdotq_laneq_s32(acc[t + 2], rows, quads, 2);
        acc[t + 3] = vdotq_laneq_s32(acc[t + 3], rows, quads, 3);
    }
}
KDA_INLINE void idot_full_group(i32xw *acc, const uint8_t *codes, const int8_t *x, ptrdiff_t group, int bits) {
    for (ptrdiff_t i = 0; i < group; i += 8, codes += bits * W, x += 8 * IDOT_TOKENS) {
        i32xw both = ivload(codes);
        ivdot_lanes(acc, bits == 8 ? both : ivlow(both), x);
        ivdot_lanes(acc, bits == 8 ? ivload(codes + 4 * W) : ivhigh(both), x + 4 * IDOT_TOKENS);
    }
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
