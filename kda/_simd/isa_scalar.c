/* scalar: the oracle. Plain C, one element at a time, libm for exp; built without vectorisation and
 * without contraction. Every other ISA is compared with this file, and this file with reference.py.
 * It is also what a machine runs that has no row of its own: bound by one multiply-add a cycle or less.
 */
#include <math.h>
#include <string.h>

#include "kernels.h"

#define ISA_NAME scalar

static uint32_t bits_of(float x) {
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

static float float_of(uint32_t b) {
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

static float f32_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00) /* inf, NaN: a NaN comes out quiet */
        return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000u : 0u));
    if (rest >= 0x400) return float_of(sign | ((rest << 13) + (112u << 23)));
    float x = (float)rest * 0x1p-24f; /* zero and subnormals */
    return sign ? -x : x;
}

static uint16_t f16_of_f32(float x) {
    uint32_t b = bits_of(x), sign = b >> 16 & 0x8000, rest = b & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* >= 65520 rounds to inf */
    if (rest < 0x38800000) {                                  /* below 2^-14: let the adder round at 2^-24 */
        float scaled = float_of(rest) + 0.5f;
        return (uint16_t)(sign | (bits_of(scaled) - bits_of(0.5f)));
    }
    rest += 0xfff + (rest >> 13 & 1); /* nearest, ties to even */
    return (uint16_t)(sign | (rest - (112u << 23)) >> 13);
}

static float f32_of_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

static uint16_t bf16_of_f32(float x) {
    uint32_t b = bits_of(x);
    if (x != x) return (uint16_t)(b >> 16 | 0x40);
    return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

static float sigmoid_of(float x) {
    float e = expf(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

static float softplus_of(float x) { return (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x))); }

#define MAP(name, to, from, expression) \
    static void name(to *y, const from *x, ptrdiff_t n) { \
        for (ptrdiff_t i = 0; i < n; i++) y[i] = expression(x[i]); \
    }
MAP(widen_f16, float, uint16_t, f32_of_f16)
MAP(widen_bf16, float, uint16_t, f32_of_bf16)
MAP(narrow_f16, uint16_t, float, f16_of_f32)
MAP(narrow_bf16, uint16_t, float, bf16_of_f32)
MAP(exp_map, float, float, expf)
MAP(sigmoid_map, float, float, sigmoid_of)
MAP(softplus_map, float, float, softplus_of)

static float dot(const float *x, const float *y, ptrdiff_t n) {
    float sum = 0.0f;
    for (ptrdiff_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

static void l2norm(float *y, const float *x, float eps, ptrdiff_t n) {
    float norm = sqrtf(dot(x, x, n) + eps);
    for (ptrdiff_t i = 0; i < n; i++) y[i] = x[i] / norm;
}

static void prepare(float *q_out, float *k_out, float *decay, const float *q, const float *k, const float *g,
                    float scale, float eps, ptrdiff_t K) {
    float qq = eps < 0.0f ? 1.0f : sqrtf(dot(q, q, K) + eps), kk = eps < 0.0f ? 1.0f : sqrtf(dot(k, k, K) + eps);
    for (ptrdiff_t i = 0; i < K; i++) {
        q_out[i] = q[i] * (scale / qq);
        k_out[i] = k[i] * (1.0f / kk);
        decay[i] = expf(g[i]);
    }
}

static void gate_softplus(float *y, const float *x, const float *bias, float ea, float bound, ptrdiff_t n) {
    (void)bound;
    for (ptrdiff_t i = 0; i < n; i++) y[i] = -ea * softplus_of(x[i] + (bias ? bias[i] : 0.0f));
}

static void gate_bounded(float *y, const float *x, const float *bias, float ea, float bound, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) y[i] = bound * sigmoid_of(ea * (x[i] + (bias ? bias[i] : 0.0f)));
}

static void update(float *s_out, const float *s_in, const float *decay, const float *k, const float *d, ptrdiff_t K,
                   ptrdiff_t V, ptrdiff_t ld_out, ptrdiff_t ld_in) {
    for (ptrdiff_t i = 0; i < K; i++)
        for (ptrdiff_t j = 0; j < V; j++) s_out[i * ld_out + j] = decay[i] * s_in[i * ld_in + j] + k[i] * d[j];
}

static void settle(float *s_out, const float *s_in, const float *pending, ptrdiff_t K, ptrdiff_t V,
                   ptrdiff_t ld_out, ptrdiff_t ld_in) {
    update(s_out, s_in, pending, pending + K, pending + 2 * K, K, V, ld_out, ld_in);
}

static void step(float *o, float *s_out, float *left, float *work, const float *s_in, const float *pending,
                 const float *q, const float *k, const float *v, const float *decay, float beta, ptrdiff_t K,
                 ptrdiff_t V, ptrdiff_t ld_out, ptrdiff_t ld_in) {
    float *d = work + 2 * K;
    float qk = dot(q, k, K);
    if (pending) {
        settle(s_out, s_in, pending, K, V, ld_out, ld_in);
        s_in = s_out, ld_in = ld_out;
    }
    for (ptrdiff_t j = 0; j < V; j++) d[j] = o[j] = 0.0f;
    for (ptrdiff_t i = 0; i < K; i++) {
        float kd = decay[i] * k[i], qd = decay[i] * q[i];
        for (ptrdiff_t j = 0; j < V; j++) {
            d[j] += kd * s_in[i * ld_in + j];
            o[j] += qd * s_in[i * ld_in + j];
        }
    }
    for (ptrdiff_t j = 0; j < V; j++) {
        d[j] = beta * (v[j] - d[j]);
        o[j] += qk * d[j];
    }
    if (left) {
        memcpy(left, decay, (size_t)K * sizeof *left);
        memcpy(left + K, k, (size_t)K * sizeof *left);
        memcpy(left + 2 * K, d, (size_t)V * sizeof *left);
    } else {
        update(s_out, s_in, decay, k, d, K, V, ld_out, ld_in);
    }
}

/* The definition, token by token: blocks exist to be fast, and this file to be plain. */
static void block(float *o, float *s, float *work, const float *q, const float *k, const float *v,
                  const float *decay, const float *beta, ptrdiff_t tokens, ptrdiff_t K, ptrdiff_t V, ptrdiff_t ld_o,
                  ptrdiff_t ld_s, ptrdiff_t ld_v) {
    for (ptrdiff_t t = 0; t < tokens; t++)
        step(o + t * ld_o, s, NULL, work, s, NULL, q + t * K, k + t * K, v + t * ld_v, decay + t * K, beta[t], K, V,
             ld_s, ld_s);
}

/* Here the blocks show: what is rounded to bfloat16 is the state at the block's start, keys and queries decayed
 * from there, keys decayed to its end, and the deltas on their way into the state. */
static void block_bf16(float *o, float *s, float *work, const float *q, const float *k, const float *v,
                       const float *decay, const float *beta, ptrdiff_t tokens, ptrdiff_t K, ptrdiff_t V,
                       ptrdiff_t ld_o, ptrdiff_t ld_s, ptrdiff_t ld_v) {
#define ROUNDED(x) f32_of_bf16(bf16_of_f32(x))
    float *total = work, *keys = work + K, *d = keys + KDA_BLOCK * K; /* d: one column at a time */
    float *x = d + KDA_BLOCK, *ka = x + 2 * KDA_BLOCK * K, *qa = ka + KDA_BLOCK * KDA_BLOCK;
    for (ptrdiff_t i = 0; i < K; i++) total[i] = 1.0f;
    for (ptrdiff_t t = 0; t < tokens; t++) {
        for (ptrdiff_t i = 0; i < K; i++) {
            total[i] *= decay[t * K + i];
            for (ptrdiff_t p = 0; p < t; p++) keys[p * K + i] *= decay[t * K + i];
            keys[t * K + i] = k[t * K + i];
            x[t * K + i] = ROUNDED(total[i] * k[t * K + i]);
            x[(KDA_BLOCK + t) * K + i] = ROUNDED(total[i] * q[t * K + i]);
        }
        for (ptrdiff_t p = 0; p <= t; p++) {
            ka[t * KDA_BLOCK + p] = dot(k + t * K, keys + p * K, K);
            qa[t * KDA_BLOCK + p] = dot(q + t * K, keys + p * K, K);
        }
    }
    for (ptrdiff_t j = 0; j < V; j++) {
        for (ptrdiff_t t = 0; t < tokens; t++) {
            float u = 0.0f, w = 0.0f;
            for (ptrdiff_t i = 0; i < K; i++) {
                u += x[t * K + i] * ROUNDED(s[i * ld_s + j]);
                w += x[(KDA_BLOCK + t) * K + i] * ROUNDED(s[i * ld_s + j]);
            }
            float rest = v[t * ld_v + j] - u;
            for (ptrdiff_t p = 0; p < t; p++) rest -= ka[t * KDA_BLOCK + p] * d[p];
            d[t] = beta[t] * rest;
            for (ptrdiff_t p = 0; p <= t; p++) w += qa[t * KDA_BLOCK + p] * d[p];
            o[t * ld_o + j] = w;
        }
        for (ptrdiff_t i = 0; i < K; i++) {
            float sum = total[i] * s[i * ld_s + j];
            for (ptrdiff_t t = 0; t < tokens; t++) sum += ROUNDED(keys[t * K + i]) * ROUNDED(d[t]);
            s[i * ld_s + j] = sum;
        }
    }
#undef ROUNDED
}

static float step_backward(float *dq, float *dk, float *dg, float *dv, float *ds, float *work, const float *s,
                           const float *q, const float *k, const float *v, const float *decay, const float *d_o,
                           float beta, ptrdiff_t K, ptrdiff_t V, ptrdiff_t ld_ds, ptrdiff_t ld_s) {
    float *e = work + K, *d = e + V, *du = d + V, dbeta = 0.0f;
    for (ptrdiff_t j = 0; j < V; j++) e[j] = d[j] = 0.0f;
    for (ptrdiff_t i = 0; i < K; i++)
        for (ptrdiff_t j = 0; j < V; j++) {
            ds[i * ld_ds + j] += q[i] * d_o[j];
            e[j] += k[i] * ds[i * ld_ds + j];
            d[j] += decay[i] * k[i] * s[i * ld_s + j];
        }
    for (ptrdiff_t j = 0; j < V; j++) {
        dbeta += e[j] * (v[j] - d[j]);
        d[j] = beta * (v[j] - d[j]);
        dv[j] = beta * e[j];
        du[j] = -dv[j];
    }
    float d_d_o = dot(d, d_o, V);
    for (ptrdiff_t i = 0; i < K; i++) {
        float *ds_row = ds + i * ld_ds;
        const float *s_row = s + i * ld_s;
        dq[i] = decay[i] * dot(s_row, d_o, V) + k[i] * d_d_o;
        dk[i] = dot(ds_row, d, V) + decay[i] * dot(s_row, du, V);
        for (ptrdiff_t j = 0; j < V; j++) ds_row[j] += k[i] * du[j];
        dg[i] = decay[i] * dot(ds_row, s_row, V);
        for (ptrdiff_t j = 0; j < V; j++) ds_row[j] *= decay[i];
    }
    return dbeta;
}

static void norm_backward(float *dx, const float *x, float factor, float eps, ptrdiff_t n) {
    float square = dot(x, x, n) + eps, along = dot(x, dx, n) / square;
    for (ptrdiff_t i = 0; i < n; i++) dx[i] = factor / sqrtf(square) * (dx[i] - along * x[i]);
}

static void prepare_backward(float *dq, float *dk, const float *q, const float *k, float scale, float eps,
                             ptrdiff_t K) {
    if (eps >= 0.0f) {
        norm_backward(dq, q, scale, eps, K);
        norm_backward(dk, k, 1.0f, eps, K);
    } else {
        for (ptrdiff_t i = 0; i < K; i++) dq[i] *= scale;
    }
}

static float gate_softplus_backward(float *dy, const float *x, const float *bias, float ea, float bound,
                                    ptrdiff_t n) {
    float sum = 0.0f;
    (void)bound;
    for (ptrdiff_t i = 0; i < n; i++) {
        float z = x[i] + (bias ? bias[i] : 0.0f);
        sum += -ea * softplus_of(z) * dy[i];
        dy[i] *= -ea * sigmoid_of(z);
    }
    return sum;
}

static float gate_bounded_backward(float *dy, const float *x, const float *bias, float ea, float bound,
                                   ptrdiff_t n) {
    float sum = 0.0f;
    for (ptrdiff_t i = 0; i < n; i++) {
        float z = x[i] + (bias ? bias[i] : 0.0f);
        dy[i] *= bound * ea * (sigmoid_of(ea * z) * sigmoid_of(-ea * z));
        sum += z * dy[i];
    }
    return sum;
}

static float activate(float x, int activation) {
    return activation == KDA_IDENTITY ? x : activation == KDA_SIGMOID ? sigmoid_of(x) : x * sigmoid_of(x);
}

static void conv(float *const *y, const float *const *rows, const float *taps, const float *bias, ptrdiff_t tokens,
                 ptrdiff_t n, ptrdiff_t ld_taps, int width, int activation) {
    for (ptrdiff_t t = 0; t < tokens; t++)
        for (ptrdiff_t c = 0; c < n; c++) {
            float sum = bias ? bias[c] : 0.0f;
            for (int w = 0; w < width; w++) sum += taps[w * ld_taps + c] * rows[t + w][c];
            y[t][c] = activate(sum, activation);
        }
}

static void conv_step(float *y, float *state, const float *x, const float *weight, const float *bias, ptrdiff_t n,
                      int width, int activation) {
    for (ptrdiff_t c = 0; c < n; c++) {
        float sum = bias ? bias[c] : 0.0f;
        float *past = state + c * (width - 1);
        for (int w = 0; w < width - 1; w++) {
            sum += weight[c * width + w] * past[w];
            past[w] = w + 1 < width - 1 ? past[w + 1] : x[c];
        }
        y[c] = activate(sum + weight[c * width + width - 1] * x[c], activation);
    }
}

static void norm_gated(float *y, const float *x, const float *gate, const float *weight, float eps, ptrdiff_t n,
                       int activation) {
    float factor = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (ptrdiff_t i = 0; i < n; i++) y[i] = factor * x[i] * weight[i] * activate(gate[i], activation);
}

static void probe_update(float *s, float a, float b, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) s[i] = s[i] * a + b;
}

static ptrdiff_t probe_fma(float *y, ptrdiff_t n) {
    float acc[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (ptrdiff_t i = 0; i < n; i++)
        for (int j = 0; j < 8; j++) acc[j] = acc[j] * 0.999f + 0.001f;
    *y = acc[0] + acc[1] + acc[2] + acc[3] + acc[4] + acc[5] + acc[6] + acc[7];
    return n * 8;
}

/* ---- IDOT ---- */

#define W 4 /* rows to a tile: any number will do */
#define Q8_BIAS 0
#define IDOT_TOKENS 1
#define IDOT_RUN 4

static float amax(const float *x, ptrdiff_t n) {
    float most = 0.0f, finite = 0.0f;
    for (ptrdiff_t i = 0; i < n; i++) {
        if (fabsf(x[i]) > most) most = fabsf(x[i]);
        finite += x[i] * 0.0f;
    }
    return most + finite;
}

static int8_t nearest(double x, int limit) {
    x = rint(x);
    return (int8_t)(x > limit ? limit : x < -limit ? -limit : x);
}

static int32_t quantize(int8_t *codes, float *scale, const float *x, ptrdiff_t n) {
    float most = amax(x, n), inverse = 127.0f / most;
    *scale = most / 127.0f;
    if (inverse > 0x1p127f) inverse = 0x1p127f, *scale = 0x1p-127f;
    if (!(most > 0.0f)) inverse = 0.0f, *scale = most; /* all zeros, or not all finite */
    int32_t sum = 0;
    for (ptrdiff_t i = 0; i < n; i++) sum += codes[i] = most > 0.0f ? nearest(x[i] * inverse, 127) : 0;
    return sum;
}

static void encode(int8_t *codes, const float *w, float scale, int limit, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) /* in float64 the quotient is never on the wrong side of a tie */
        codes[i] = scale == 0.0f ? 0 : nearest((double)w[i] / (double)scale, limit);
}

static void idot_q8(float *y, const uint8_t *codes, const uint16_t *scales, const int8_t *x, const float *x_scales,
                    const int32_t *x_sums, ptrdiff_t tokens, ptrdiff_t rows, ptrdiff_t groups, ptrdiff_t group,
                    ptrdiff_t ld_y) {
    (void)x_sums;
    for (ptrdiff_t t = 0; t < tokens; t++)
        for (ptrdiff_t r = 0; r < rows; r++) {
            float sum = 0.0f;
            for (ptrdiff_t g = 0; g < groups; g++) {
                int32_t exact = 0;
                for (ptrdiff_t i = g * group; i < (g + 1) * group; i++)
                    exact += (int8_t)codes[i / 4 * 4 * W + 4 * r + i % 4] * x[(i / 4 * tokens + t) * 4 + i % 4];
                sum += (float)exact * f32_of_f16(scales[g * W + r]) * x_scales[g * tokens + t];
            }
            y[t * ld_y + r] = sum;
        }
}

static void idot_q4(float *y, const uint8_t *codes, const uint16_t *scales, const int8_t *x, const float *x_scales,
                    const int32_t *x_sums, ptrdiff_t tokens, ptrdiff_t rows, ptrdiff_t groups, ptrdiff_t group,
                    ptrdiff_t ld_y) {
    (void)x_sums;
    for (ptrdiff_t t = 0; t < tokens; t++)
        for (ptrdiff_t r = 0; r < rows; r++) {
            float sum = 0.0f;
            for (ptrdiff_t g = 0; g < groups; g++) {
                int32_t exact = 0;
                for (ptrdiff_t i = g * group; i < (g + 1) * group; i++) {
                    int byte = codes[i / 8 * 4 * W + 4 * r + i % 4], code = (i % 8 < 4 ? byte & 15 : byte >> 4) - 8;
                    exact += code * x[(i / 4 * tokens + t) * 4 + i % 4];
                }
                sum += (float)exact * f32_of_f16(scales[g * W + r]) * x_scales[g * tokens + t];
            }
            y[t * ld_y + r] = sum;
        }
}

static float probe_read(const float *s, ptrdiff_t n) {
    float sum = 0.0f;
    for (ptrdiff_t i = 0; i < n; i++) sum += s[i];
    return sum;
}

static ptrdiff_t probe_idot(float *y, ptrdiff_t n) {
    int32_t acc[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (ptrdiff_t i = 0; i < n; i++)
        for (int j = 0; j < 8; j++) acc[j] += (int8_t)i * (int8_t)j;
    *y = (float)(acc[0] + acc[1] + acc[2] + acc[3] + acc[4] + acc[5] + acc[6] + acc[7]);
    return n * 8;
}

/* ---- dense weights ---- */

#define NR 1

static void dense(float *y, const float *panels, const float *x, ptrdiff_t tokens, ptrdiff_t rows, ptrdiff_t K,
                  ptrdiff_t ld_x, ptrdiff_t ld_y) {
    for (ptrdiff_t t = 0; t < tokens; t++)
        for (ptrdiff_t r = 0; r < rows; r++) {
            const float *w = panels + r / W * W * K + r % W;
            float sum = 0.0f;
            for (ptrdiff_t start = 0; start < K; start += 256) {
                float part = 0.0f;
                for (ptrdiff_t k = start; k < K && k < start + 256; k++) part += w[k * W] * x[t * ld_x + k];
                sum += part;
            }
            y[t * ld_y + r] = sum;
        }
}

#include "table.inc"
