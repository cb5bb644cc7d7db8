/* The kernel contract.
 *
 * One typedef and one comment per kernel, one struct of pointers per ISA. Everything above this
 * header calls kernels through that struct; everything below it is one file per ISA.
 *
 * What every kernel keeps:
 *   - Outputs first, inputs next, sizes last (ptrdiff_t). Strides count elements.
 *   - A pointer needs its element's alignment, no more. Sizes are >= 1.
 *   - An output overlaps an input only where the comment allows it, and then exactly.
 *   - It never allocates, locks, fails, prints, starts threads, or reads or writes past its sizes.
 *     It leaves the floating-point environment as it was (no FTZ, no rounding mode).
 *   - Threads are the caller's affair: any sub-range of heads, rows or columns may be asked for, and
 *     gives the bits that the whole would have given there.
 *   - The same inputs on the same ISA give the same bits.
 *
 * `ulp <= x` in a comment is that kernel's error bound against the correctly rounded float32 result,
 * over every float32 input; for subnormal results an ulp is the spacing of subnormals, 2^-149.
 * NaN gives NaN. tests/test_kernels.py reads these bounds from here.
 */
#ifndef KDA_KERNELS_H
#define KDA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* ---- conversion: exact going up, round to nearest even going down, NaN stays NaN ---- */
typedef void kda_widen_fn(float *y, const uint16_t *x, ptrdiff_t n);
typedef void kda_narrow_fn(uint16_t *y, const float *x, ptrdiff_t n);

/* ---- elementwise; y == x is allowed ---- */

/* exp:      y = e^x.  0 below -104, inf above 88.73.                               ulp <= 1.0 */
/* sigmoid:  y = 1 / (1 + e^-x), subnormal results included.                        ulp <= 2.5 */
/* softplus: y = log(1 + e^x), x itself above 20; e^x in the far negative.          ulp <= 3.0 */
typedef void kda_map_fn(float *y, const float *x, ptrdiff_t n);

/* scale: y = a * x, rounded once.                                                  ulp <= 0.0 */
typedef void kda_scale_fn(float *y, const float *x, float a, ptrdiff_t n);

/* y = x * a / sqrt(sum(x * x) + eps). The sum is taken in one fixed order.
 * relative error <= (n / 2 + 5) * 2^-24 */
typedef void kda_l2norm_fn(float *y, const float *x, float a, float eps, ptrdiff_t n);

/* The two decay gates, log space, z = x + bias (bias may be NULL: 0). ea = exp(A_log), one per head.
 *   gate_softplus: y = -ea * softplus(z), within (ea + 1) * 2^-149 where softplus(z) is subnormal;   ulp <= 4.0
 *   gate_bounded:  y = bound * sigmoid(ea * z)       bound < 0; ea multiplies INSIDE the sigmoid     ulp <= 3.0
 * The bounds are for z and ea * z as rounded to float32.
 */
typedef void kda_gate_fn(float *y, const float *x, const float *bias, float ea, float bound, ptrdiff_t n);

/* ---- the delta rule ---- */

/* One token of one head, over V columns of its state S (K rows, `ld` elements from row to row):
 *
 *     S <- diag(decay) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q
 *
 * decay = exp(g), in [0, 1]. s_out == s_in is allowed. Columns are independent: splitting V changes
 * no bit. work: 2 * K + V floats, contents undefined before and after.
 *
 * It reads S once to form u = (diag(decay) S)^T k and w = (diag(decay) S)^T q, gets o = w + (q.k) d
 * without a second look, and reads S once more to write it: 4 floating-point operations, 2 loads and
 * 1 store per element. Sums run over the rows in order, each within (K + 4) * 2^-24 of the sum of its
 * terms' magnitudes, to first order.
 */
typedef void kda_step_fn(float *o, float *s_out, float *work, const float *s_in, const float *q, const float *k,
                         const float *v, const float *decay, float beta, ptrdiff_t K, ptrdiff_t V, ptrdiff_t ld_out,
                         ptrdiff_t ld_in);

/* ---- ceilings: what this ISA reaches when nothing else is in the way ---- */

/* s = s * a + b in place: the memory traffic of a state update, and nothing more. */
typedef void kda_probe_update_fn(float *s, float a, float b, ptrdiff_t n);

/* Multiply-adds in registers, n rounds; returns how many multiply-adds were done. y: one float. */
typedef ptrdiff_t kda_probe_fma_fn(float *y, ptrdiff_t n);

struct kda_kernels {
    const char *name;
    kda_widen_fn *widen_f16, *widen_bf16;
    kda_narrow_fn *narrow_f16, *narrow_bf16;
    kda_map_fn *exp, *sigmoid, *softplus;
    kda_scale_fn *scale;
    kda_l2norm_fn *l2norm;
    kda_gate_fn *gate_softplus, *gate_bounded;
    kda_step_fn *step;
    kda_probe_update_fn *probe_update;
    kda_probe_fma_fn *probe_fma;
};

/* ---- dispatch.c ---- */

#define KDA_MAX_ISAS 16

struct kda_isa {
    const struct kda_kernels *kernels;
    uint32_t needs; /* the CPU and OS features its file is compiled for (cpu.h) */
    int runs_here;
};

/* The rows of isa_table.h built into this library, best first; the last is scalar. */
extern struct kda_isa kda_isas[KDA_MAX_ISAS];
extern int kda_isa_count;
void kda_dispatch_init(void);

#endif
