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

/* y = x / sqrt(sum(x * x) + eps). The sum is taken in one fixed order. y == x is allowed.
 * relative error <= (n / 2 + 5) * 2^-24 */
typedef void kda_l2norm_fn(float *y, const float *x, float eps, ptrdiff_t n);

/* The two decay gates, log space, z = x + bias (bias may be NULL: 0). ea = exp(A_log), one per head.
 *   gate_softplus: y = -ea * softplus(z), within (ea + 1) * 2^-149 where softplus(z) is subnormal;   ulp <= 8.0
 *   gate_bounded:  y = bound * sigmoid(ea * z)       bound < 0; ea multiplies INSIDE the sigmoid     ulp <= 6.0
 * The bounds are for z and ea * z as rounded to float32; a factor just below a power of 2 nearly doubles the ulps.
 */
typedef void kda_gate_fn(float *y, const float *x, const float *bias, float ea, float bound, ptrdiff_t n);

/* ---- the delta rule ---- */

/* One token's q, k and log decay g, ready for the two kernels below:
 *     q_out = q * scale / sqrt(sum(q * q) + eps), k_out = k / sqrt(sum(k * k) + eps), decay = e^g
 * eps < 0: no norm, q_out = q * scale and k_out = k. q_out == q, k_out == k and decay == g are allowed.
 * Errors as of l2norm and exp. */
typedef void kda_prepare_fn(float *q_out, float *k_out, float *decay, const float *q, const float *k,
                            const float *g, float scale, float eps, ptrdiff_t K);

/* An update of S that is still to be made, S <- diag(decay) S + k d^T, in floats: decay [K], k [K], d [V]. */
#define KDA_PENDING(K, V) (2 * (K) + (V))

/* One token of one head, over V columns of its state S (K rows, `ld` elements from row to row):
 *
 *     S <- diag(decay) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q
 *
 * decay = exp(g), in [0, 1]. s_out == s_in is allowed. Columns are independent: splitting V changes
 * no bit. work: 2 * K + V floats, contents undefined before and after.
 *
 * pending: NULL, or the update of the token before, which s_in lacks: it is made first. left: NULL, or where this
 * token's own update goes instead of into s_out, for the next call; left == pending is allowed. Without pending
 * and with left S is read alone, and s_out not touched. However updates are put off, the bits are the same.
 *
 * A pass reads S once to form u = (diag(decay) S)^T k and w = (diag(decay) S)^T q, and gets o = w + (q.k) d
 * without a second look. 4 floating-point operations per element; 2 loads and 1 store without pending and left (a
 * second pass makes the update), 1 and 1 with both (the pass makes the pending one). Sums run over the rows in
 * order, each within (K + 4) * 2^-24 of the sum of its terms' magnitudes, to first order.
 */
typedef void kda_step_fn(float *o, float *s_out, float *left, float *work, const float *s_in, const float *pending,
                         const float *q, const float *k, const float *v, const float *decay, float beta,
                         ptrdiff_t K, ptrdiff_t V, ptrdiff_t ld_out, ptrdiff_t ld_in);

/* The pending update alone, with the bits that a step makes it with. s_out == s_in is allowed. */
typedef void kda_settle_fn(float *s_out, const float *s_in, const float *pending, ptrdiff_t K, ptrdiff_t V,
                           ptrdiff_t ld_out, ptrdiff_t ld_in);

/* Tokens in a block, the most that kda_block_fn takes. */
#define KDA_BLOCK 16
/* Floats of its work area: coefficients, sums of one panel (at most 64 columns), rows of K, pairs of bfloat16 (up to
 * whole tiles of 32 of K). */
#define KDA_BLOCK_WORK(K) \
    (KDA_BLOCK * (2 * KDA_BLOCK + 3 * 64 + 3 * (K)) + (K) + \
     ((K) + 31) / 32 * (16 * (2 * KDA_BLOCK + 64) + 32 * KDA_BLOCK))

/* `tokens` in [1, KDA_BLOCK] tokens of one head at once, over V columns of its state s, in place: what that
 * many kda_step_fn would give, to rounding. q, k, decay: [tokens][K] contiguous; v, o: [tokens][V], `ld` elements
 * from token to token. Columns are independent, and a token's output does not depend on how many follow
 * it in the block, to the bit. S is read once and written once.
 *
 * block_bf16 is the same with the operands of the three products with S (S, the decayed keys and queries; the
 * pending keys, the deltas) rounded to bfloat16, and everything else, S itself and all sums included, in float32:
 * within 2^-6 of the largest value for inputs of ordinary size. Faster only where the ISA multiplies bfloat16
 * pairs.
 */
typedef void kda_block_fn(float *o, float *s, float *work, const float *q, const float *k, const float *v,
                          const float *decay, const float *beta, ptrdiff_t tokens, ptrdiff_t K, ptrdiff_t V,
                          ptrdiff_t ld_o, ptrdiff_t ld_s, ptrdiff_t ld_v);

/* ---- its gradients ---- */

/* kda_step_fn backwards. S (`ld_s`) is the state before the token, ds [K][V] (`ld_ds`) the gradient by the state
 * after it and then, in place, by the state before it; d_o [V] is the gradient by o. With Sd = diag(decay) S, u =
 * Sd^T k, d = beta (v - u):
 *
 *     G = ds + q d_o^T;  e = G^T k;  du = -beta e;  Gd = G + k du^T
 *     dq = Sd d_o + (d.d_o) k;  dk = G d + Sd du;  dv = beta e;  dbeta = e.(v - u);
 *     dg = the sums along the rows of Gd * Sd  (by log decay: 0 where decay is 0);  ds <- diag(decay) Gd
 *
 * Returns dbeta. work: K + 3 * V floats, contents undefined before and after. S is read twice, ds read and written
 * twice. Sums of n terms are within (n + 6) * 2^-24 of the sum of their magnitudes, to first order.
 */
typedef float kda_step_backward_fn(float *dq, float *dk, float *dg, float *dv, float *ds, float *work,
                                   const float *s, const float *q, const float *k, const float *v,
                                   const float *decay, const float *d_o, float beta, ptrdiff_t K, ptrdiff_t V,
                                   ptrdiff_t ld_ds, ptrdiff_t ld_s);

/* Gradients by what kda_prepare_fn returned become gradients by its arguments q and k, in place.
 * eps < 0: dq * scale, and dk as it is. Sums as above. */
typedef void kda_prepare_backward_fn(float *dq, float *dk, const float *q, const float *k, float scale, float eps,
                                     ptrdiff_t K);

/* The gradient by a gate's y becomes that by its x (and bias), in place; returns that by A_log, a sum over n.
 * Elementwise within 2^-20 of the value, and 2^-140. */
typedef float kda_gate_backward_fn(float *dy, const float *x, const float *bias, float ea, float bound,
                                   ptrdiff_t n);

/* ---- the epilogues ---- */

enum { KDA_IDENTITY = 0, KDA_SIGMOID = 1, KDA_SILU = 2 }; /* activation; silu(x) = x * sigmoid(x) */

/* Depthwise causal convolution over n channels, width taps (1 to KDA_CONV_MAX), then the activation:
 *     y[t][c] = activation(bias[c] + sum over w of taps[w * ld_taps + c] * rows[t + w][c])
 * rows: width - 1 + tokens pointers to n floats, the history first, oldest first. bias may be NULL. Taps are summed
 * from the oldest. A y row may be the row of the same token (rows[t + width - 1]) only if it is not history of a
 * later one.
 */
#define KDA_CONV_MAX 8
typedef void kda_conv_fn(float *const *y, const float *const *rows, const float *taps, const float *bias,
                         ptrdiff_t tokens, ptrdiff_t n, ptrdiff_t ld_taps, int width, int activation);

/* The same for one token with everything channel by channel, as caches and checkpoints hold it: state [n][width -
 * 1] shifts by one, weight [n][width]. */
typedef void kda_conv_step_fn(float *y, float *state, const float *x, const float *weight, const float *bias,
                              ptrdiff_t n, int width, int activation);

/* y = x / sqrt(mean(x * x) + eps) * weight * activation(gate). y == x and y == gate are allowed.
 * relative error <= (n / 2 + 14) * 2^-24 */
typedef void kda_norm_gated_fn(float *y, const float *x, const float *gate, const float *weight, float eps,
                               ptrdiff_t n, int activation);

/* ---- IDOT: int8 activations times group-quantised weights ----
 *
 * Weights lie in tiles of `lanes` rows (a row per vector lane). A tile's codes, group after group:
 *     q8  [group / 4][lanes][4]   four consecutive codes of each row, each plus q8_bias as a byte
 *     q4  [group / 8][lanes][4]   byte i: code i of eight in its low nibble, code i + 4 in its high one, each plus 8
 * and its scales [groups][lanes] float16. Activations of a block of tokens: codes in [-127, 127] by quads, [K /
 * 4][tokens][4], so that a vector of weights meets a broadcast quad and no sum runs across lanes; scales
 * [groups][tokens]; sums of the codes of a group [groups][tokens]. In a full block (idot_tokens tokens) codes lie in
 * runs of idot_run in place of 4; a group that is no multiple of that ends with a shorter run. */

/* Activations of one token and group: scale = max|x| / 127 (2^-127 at least, 0 for all zeros), code = x * (127 /
 * max|x|), each float32 operation rounded, to the nearest integer, ties to even; the same bits on every ISA. NaN or
 * infinity in x makes the scale NaN and the codes 0. Returns the sum of the codes. n is a multiple of 4. */
typedef int32_t kda_quantize_fn(int8_t *codes, float *scale, const float *x, ptrdiff_t n);

/* Weights of one row and group: amax = max|w| (NaN if any w is NaN); and, for the scale then stored, the nearest
 * codes within
 * [-limit, limit], so that |w - code * scale| <= scale / 2. scale > 0, or 0 where all w are 0. */
typedef float kda_amax_fn(const float *w, ptrdiff_t n);
typedef void kda_encode_fn(int8_t *codes, const float *w, float scale, int limit, ptrdiff_t n);

/* One tile of `rows` <= lanes rows times a block of `tokens` (1, 2, 4 or idot_tokens) tokens:
 *     y[t * ld_y + r] = sum over groups, in order, of (float)(integer sum) * row scale * token scale
 * Integer sums are exact, and each float operation, from left to right, is rounded once: all ISAs give the same
 * bits (of a NaN, that it is one). In this order only what float32 cannot hold is lost: the two scales alone may
 * overflow, or vanish, where the product does not. Within (groups + 2) * 2^-24 of the sum of the terms' magnitudes.
 * `group` is a multiple of 8, at most 512. */
typedef void kda_idot_fn(float *y, const uint8_t *codes, const uint16_t *scales, const int8_t *x,
                         const float *x_scales, const int32_t *x_sums, ptrdiff_t tokens, ptrdiff_t rows,
                         ptrdiff_t groups, ptrdiff_t group, ptrdiff_t ld_y);

/* ---- dense float32 weights ----
 *
 * Weights lie in panels of `dense_lanes` rows, [K][dense_lanes] each, the lanes past the last row 0. */

/* `rows` rows, from the start of a panel, times `tokens` tokens:
 *     y[t * ld_y + r] = sum over k of w[r][k] * x[t * ld_x + k]
 * in blocks of 256 of k, each summed from 0 in order, the blocks added in order: a result's bits do not depend on
 * the number of tokens or rows. Within (258 + K / 256) * 2^-24 of the sum of the terms' magnitudes. */
typedef void kda_dense_fn(float *y, const float *panels, const float *x, ptrdiff_t tokens, ptrdiff_t rows,
                          ptrdiff_t K, ptrdiff_t ld_x, ptrdiff_t ld_y);

/* ---- ceilings: what this ISA reaches when nothing else is in the way ---- */

/* s = s * a + b in place: the memory traffic of a state update, and nothing more. */
typedef void kda_probe_update_fn(float *s, float a, float b, ptrdiff_t n);

/* The sum of n floats, four at a time: what reading alone costs. */
typedef float kda_probe_read_fn(const float *s, ptrdiff_t n);

/* Multiply-adds in registers, n rounds; returns how many multiply-adds were done. y: one float. */
typedef ptrdiff_t kda_probe_fma_fn(float *y, ptrdiff_t n);

struct kda_kernels {
    const char *name;
    kda_widen_fn *widen_f16, *widen_bf16;
    kda_narrow_fn *narrow_f16, *narrow_bf16;
    kda_map_fn *exp, *sigmoid, *softplus;
    kda_l2norm_fn *l2norm;
    kda_gate_fn *gate_softplus, *gate_bounded;
    kda_prepare_fn *prepare;
    kda_step_fn *step;
    kda_settle_fn *settle;
    kda_block_fn *block, *block_bf16;
    kda_step_backward_fn *step_backward;
    kda_prepare_backward_fn *prepare_backward;
    kda_gate_backward_fn *gate_softplus_backward, *gate_bounded_backward;
    kda_conv_fn *conv;
    kda_conv_step_fn *conv_step;
    kda_norm_gated_fn *norm_gated;
    kda_probe_update_fn *probe_update;
    kda_probe_fma_fn *probe_fma;
    kda_probe_read_fn *probe_read;
    kda_probe_fma_fn *probe_idot; /* int8 ones, as idot_q8 makes them */
    kda_quantize_fn *quantize;
    kda_amax_fn *amax;
    kda_encode_fn *encode;
    kda_idot_fn *idot_q8, *idot_q4;
    int lanes, q8_bias, idot_tokens, idot_run;
    kda_dense_fn *dense;
    int dense_lanes;
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

/* Name and version of the compiler, and the flags that setup.py gave it for every file (warnings left out). */
const char *kda_compiler(void);
const char *kda_flags(void);

#endif
