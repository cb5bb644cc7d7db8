/* Walks the tokens of one head and calls the ISA's kernels for each. Nothing here is wide, and
 * nothing is computed that a kernel does not compute. */
#include "recurrent.h"

#include <string.h>

enum { LANES = 16 }; /* column blocks end on the widest vector of any ISA */

static ptrdiff_t padded(ptrdiff_t n) { return (n + LANES - 1) / LANES * LANES; }

ptrdiff_t kda_items(const struct kda_job *job) { return job->N * job->HV * job->splits; }

/* q, k, decay [K]; v, o [V]; the step's work [2K + V] */
ptrdiff_t kda_scratch_floats(const struct kda_job *job) { return 5 * padded(job->K) + 3 * padded(job->V); }

static const void *at(const struct kda_tensor *x, ptrdiff_t batch, ptrdiff_t token, ptrdiff_t head, ptrdiff_t i) {
    ptrdiff_t offset = batch * x->batch + token * x->token + head * x->head + i;
    return (const char *)x->data + offset * (x->dtype == KDA_F32 ? 4 : 2);
}

/* n floats: where they lie if they are float32, else widened into `row`. */
static const float *as_f32(const struct kda_kernels *isa, int dtype, const void *x, float *row, ptrdiff_t n) {
    if (dtype == KDA_F32) return x;
    (dtype == KDA_F16 ? isa->widen_f16 : isa->widen_bf16)(row, x, n);
    return row;
}

/* The other way: `row` into an array of `dtype`; a float32 row was computed in its place. */
static void put_f32(const struct kda_kernels *isa, int dtype, void *y, const float *row, ptrdiff_t n) {
    if (dtype != KDA_F32) (dtype == KDA_F16 ? isa->narrow_f16 : isa->narrow_bf16)(y, row, n);
}

static const float *prepare_qk(const struct kda_job *job, const struct kda_tensor *x, const void *at_x,
                               float factor, float *row) {
    const float *from = as_f32(job->isa, x->dtype, at_x, row, job->K);
    if (job->flags & KDA_L2NORM)
        job->isa->l2norm(row, from, factor, job->eps, job->K);
    else if (factor != 1.0f)
        job->isa->scale(row, from, factor, job->K);
    else
        return from;
    return row;
}

static const float *log_decay(const struct kda_job *job, const void *at_g, ptrdiff_t hv, float ea, float *row) {
    const float *g = as_f32(job->isa, job->g.dtype, at_g, row, job->K);
    if (!(job->flags & KDA_GATE)) return g;
    const float *bias = job->dt_bias ? job->dt_bias + hv * job->K : NULL;
    (job->flags & KDA_BOUNDED ? job->isa->gate_bounded : job->isa->gate_softplus)(row, g, bias, ea,
                                                                                  job->lower_bound, job->K);
    return row;
}

/* exp(A_log) of the head; without A_log the bounded gate's factor is 1. */
static float gate_factor(const struct kda_job *job, ptrdiff_t hv) {
    float ea = 1.0f;
    if (job->flags & KDA_GATE && job->A_log) job->isa->exp(&ea, job->A_log + hv, 1);
    return ea;
}

static float prepare_beta(const struct kda_job *job, const void *at_beta) {
    float row, beta = *as_f32(job->isa, job->beta.dtype, at_beta, &row, 1);
    if (job->flags & KDA_BETA_SIGMOID) job->isa->sigmoid(&beta, &beta, 1);
    return job->flags & KDA_NEG_EIGVAL ? 2.0f * beta : beta;
}

void kda_recurrent_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_job *job = job_;
    const struct kda_kernels *isa = job->isa;
    ptrdiff_t K = job->K, V = job->V;
    ptrdiff_t split = item % job->splits, hv = item / job->splits % job->HV, n = item / job->splits / job->HV;
    ptrdiff_t h = hv / (job->HV / job->H);
    ptrdiff_t block = padded((V + job->splits - 1) / job->splits);
    ptrdiff_t j0 = split * block, columns = V - j0 < block ? V - j0 : block;
    if (columns <= 0) return;

    ptrdiff_t row = n, t0 = 0, t1 = job->T;
    if (job->cu_seqlens) row = 0, t0 = job->cu_seqlens[n], t1 = job->cu_seqlens[n + 1];

    float *scratch = job->scratch + thread * kda_scratch_floats(job);
    float *q_row = scratch, *k_row = q_row + padded(K), *g_row = k_row + padded(K), *work = g_row + padded(K);
    float *v_row = work + 2 * padded(K) + padded(V), *o_row = v_row + padded(V);

    float *s_out = (float *)at(&job->s_out, n, 0, hv, j0);
    const float *s_in = job->s_in.data ? at(&job->s_in, n, 0, hv, j0) : NULL;
    if (!s_in || t0 == t1) { /* zeros, or no token at all: the state as it came */
        for (ptrdiff_t i = 0; i < K; i++) {
            if (!s_in)
                memset(s_out + i * V, 0, (size_t)columns * sizeof *s_out);
            else if (s_in != s_out)
                memcpy(s_out + i * V, s_in + i * V, (size_t)columns * sizeof *s_out);
        }
        s_in = s_out;
    }

    float ea = gate_factor(job, hv);
    for (ptrdiff_t t = t0; t < t1; t++) {
        const float *q = prepare_qk(job, &job->q, at(&job->q, row, t, h, 0), job->scale, q_row);
        const float *k = prepare_qk(job, &job->k, at(&job->k, row, t, h, 0), 1.0f, k_row);
        isa->exp(g_row, log_decay(job, at(&job->g, row, t, hv, 0), hv, ea, g_row), K);
        const float *v = as_f32(isa, job->v.dtype, at(&job->v, row, t, hv, j0), v_row, columns);
        float beta = prepare_beta(job, at(&job->beta, row, t, hv, 0));

        void *o_at = (void *)at(&job->o, row, t, hv, j0);
        float *o = job->o.dtype == KDA_F32 ? o_at : o_row;
        isa->step(o, s_out, work, s_in, q, k, v, g_row, beta, K, columns, V, V);
        put_f32(isa, job->o.dtype, o_at, o, columns);
        s_in = s_out;
    }
}

void kda_gate_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_job *job = job_;
    ptrdiff_t hv = item % job->HV, t = item / job->HV % job->T, b = item / job->HV / job->T;
    (void)thread;
    log_decay(job, at(&job->g, b, t, hv, 0), hv, gate_factor(job, hv), (float *)at(&job->o, b, t, hv, 0));
}

void kda_l2norm_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_job *job = job_;
    ptrdiff_t h = item % job->H, t = item / job->H % job->T, b = item / job->H / job->T;
    void *y_at = (void *)at(&job->o, b, t, h, 0);
    float *y = job->o.dtype == KDA_F32 ? y_at : job->scratch + thread * kda_scratch_floats(job);
    prepare_qk(job, &job->q, at(&job->q, b, t, h, 0), 1.0f, y);
    put_f32(job->isa, job->o.dtype, y_at, y, job->K);
}
