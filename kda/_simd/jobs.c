/* Walks the tokens of one item and calls the ISA's kernels for each block of them. Nothing here is
 * wide, and nothing is computed that a kernel does not compute. */
#include "jobs.h"

#include <string.h>

enum { LANES = 16 }; /* column blocks end on the widest vector of any ISA */

static ptrdiff_t padded(ptrdiff_t n) { return (n + LANES - 1) / LANES * LANES; }

static const void *at(const struct kda_tensor *x, ptrdiff_t batch, ptrdiff_t token, ptrdiff_t head, ptrdiff_t i) {
    ptrdiff_t offset = batch * x->batch + token * x->token + head * x->head + i;
    return (const char *)x->data + offset * (x->dtype == KDA_F32 ? 4 : 2);
}

/* n elements of any dtype as floats in `row`. */
static void get_f32(const struct kda_kernels *isa, int dtype, float *row, const void *x, ptrdiff_t n) {
    if (dtype == KDA_F32)
        memcpy(row, x, (size_t)n * sizeof *row);
    else
        (dtype == KDA_F16 ? isa->widen_f16 : isa->widen_bf16)(row, x, n);
}

/* n floats: where they lie if they are float32, else widened into `row`. */
static const float *as_f32(const struct kda_kernels *isa, int dtype, const void *x, float *row, ptrdiff_t n) {
    if (dtype == KDA_F32) return x;
    (dtype == KDA_F16 ? isa->widen_f16 : isa->widen_bf16)(row, x, n);
    return row;
}

/* The other way: `row` into an array of `dtype`, unless it was computed in its place. */
static void put_f32(const struct kda_kernels *isa, int dtype, void *y, const float *row, ptrdiff_t n) {
    if (dtype != KDA_F32)
        (dtype == KDA_F16 ? isa->narrow_f16 : isa->narrow_bf16)(y, row, n);
    else if (y != row)
        memcpy(y, row, (size_t)n * sizeof *row);
}

/* The tokens [t0, t1) of sequence n, and the batch row they are in. */
static void span(const int64_t *cu_seqlens, ptrdiff_t n, ptrdiff_t T, ptrdiff_t *row, ptrdiff_t *t0,
                 ptrdiff_t *t1) {
    *row = n, *t0 = 0, *t1 = T;
    if (cu_seqlens) *row = 0, *t0 = cu_seqlens[n], *t1 = cu_seqlens[n + 1];
}

/* Rows of one head lie far apart, often by a power of two: no hardware prefetcher follows them, and many of
 * them share a cache set. So they are asked for a few tokens ahead, no earlier, and copied together. */
enum { AHEAD = 8 };
#if defined(__GNUC__) || defined(__clang__)
static void prefetch_row(const struct kda_tensor *x, const void *row, ptrdiff_t n) {
    ptrdiff_t bytes = n * (x->dtype == KDA_F32 ? 4 : 2);
    for (ptrdiff_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i);
}
#else
static void prefetch_row(const struct kda_tensor *x, const void *row, ptrdiff_t n) { (void)x, (void)row, (void)n; }
#endif

/* ---- the delta rule ---- */

static ptrdiff_t head_groups(const struct kda_job *job) { return (job->HV + job->group - 1) / job->group; }

ptrdiff_t kda_delta_items(const struct kda_job *job) { return job->N * head_groups(job) * job->splits; }

/* of an update that a step leaves to the next */
static ptrdiff_t left_floats(const struct kda_job *job) {
    return job->block == 1 ? padded(KDA_PENDING(job->K, job->V)) : 0;
}

/* q, k, decay [block, K]; v, o [block, V]; beta [block]; an update left; work of the step or the block; widened
 * rows of the convolution */
ptrdiff_t kda_delta_scratch(const struct kda_job *job) {
    ptrdiff_t work = job->block == 1 ? 2 * job->K + job->V : KDA_BLOCK_WORK(job->K);
    ptrdiff_t rows = (KDA_CONV_MAX + KDA_BLOCK) * (job->K > job->V ? job->K : job->V);
    if (job->conv_width && work < rows) work = rows; /* they are done with when the work begins */
    ptrdiff_t s = job->s_dtype == KDA_F32 ? 0 : job->K * padded(job->V);
    return padded(job->block * 3 * job->K) + job->block * 2 * padded(job->V) + KDA_BLOCK + left_floats(job) +
           padded(work) + s;
}

static const float *log_decay(const struct kda_job *job, const void *at_g, ptrdiff_t hv, float ea, float *row) {
    const float *g = as_f32(job->isa, job->g.dtype, at_g, row, job->K);
    if (!(job->flags & KDA_GATE)) return g;
    const float *bias = job->dt_bias ? job->dt_bias + hv * job->K : NULL;
    kda_gate_fn *gate = job->flags & KDA_BOUNDED ? job->isa->gate_bounded : job->isa->gate_softplus;
    gate(row, g, bias, ea, job->lower_bound, job->K);
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

/* K rows of `columns`, from one state to another; s_in NULL: zeros. */
static void copy_state(float *s_out, const float *s_in, ptrdiff_t K, ptrdiff_t columns, ptrdiff_t ld) {
    for (ptrdiff_t i = 0; i < K; i++) {
        if (s_in)
            memcpy(s_out + i * ld, s_in + i * ld, (size_t)columns * sizeof *s_out);
        else
            memset(s_out + i * ld, 0, (size_t)columns * sizeof *s_out);
    }
}

/* What one item works on: sequence n, value head hv with its q/k head h, columns [j0, j0 + columns) of S; and its
 * share of the scratch memory. */
struct delta_item {
    ptrdiff_t n, row, start, t0, t1, h, hv, j0, columns, ld; /* the sequence's start, and its tokens [t0, t1) */
    float ea;
    float *q, *k, *decay; /* [block, K] */
    float *v, *o;         /* [block, ld] */
    float *beta, *left, *work;
};

static struct delta_item delta_item(const struct kda_job *job, ptrdiff_t item, int thread) {
    struct delta_item it;
    ptrdiff_t split = item % job->splits, width = padded((job->V + job->splits - 1) / job->splits);
    it.hv = item / job->splits % job->HV;
    it.h = it.hv / (job->HV / job->H);
    it.n = item / job->splits / job->HV;
    it.j0 = split * width;
    it.columns = job->V - it.j0 < width ? job->V - it.j0 : width;
    it.ld = padded(it.columns);
    span(job->cu_seqlens, it.n, job->T, &it.row, &it.t0, &it.t1);
    it.start = it.t0;
    if (job->to) {
        if (it.t1 - it.start > job->to) it.t1 = it.start + job->to;
        it.t0 = it.t1 - it.start < job->from ? it.t1 : it.start + job->from;
    }
    it.ea = gate_factor(job, it.hv);
    it.q = job->scratch + thread * job->scratch_floats;
    it.k = it.q + job->block * job->K;
    it.decay = it.k + job->block * job->K;
    it.v = it.q + padded(job->block * 3 * job->K);
    it.o = it.v + job->block * it.ld;
    it.beta = it.o + job->block * it.ld;
    it.left = it.beta + KDA_BLOCK;
    it.work = it.left + left_floats(job);
    return it;
}

/* Tap w of the history of sequence n, from channel c0. */
static float *history(const struct kda_short_conv *conv, const struct kda_tensor *x, float *const *rows,
                      ptrdiff_t n, ptrdiff_t w, ptrdiff_t c0) {
    if (rows) return rows[n] + conv->start + w * conv->D + c0;
    return (float *)at(x, n, w, 0, c0);
}

/* The rows x[t .. t + tokens) of one head, channels [c0, c0 + n), convolved and activated into y. */
static void convolve(const struct kda_job *job, const struct kda_short_conv *conv, const struct kda_tensor *x,
                     const struct delta_item *it, ptrdiff_t t, ptrdiff_t tokens, ptrdiff_t head, ptrdiff_t j0,
                     ptrdiff_t c0, ptrdiff_t n, float *y, ptrdiff_t ld) {
    const float *rows[KDA_CONV_MAX + KDA_BLOCK];
    float *y_rows[KDA_BLOCK];
    ptrdiff_t past = job->conv_width - 1;
    for (ptrdiff_t i = 0; i < past + tokens; i++) {
        ptrdiff_t from = t - past + i;
        if (from < it->t0)
            rows[i] = history(conv, &conv->past, job->rows.past, it->n, past + from - it->t0, c0);
        else /* work lies idle until the block begins */
            rows[i] = as_f32(job->isa, x->dtype, at(x, it->row, from, head, j0), it->work + i * n, n);
    }
    for (ptrdiff_t i = 0; i < tokens; i++) y_rows[i] = y + i * ld;
    job->isa->conv(y_rows, rows, conv->taps + c0, NULL, tokens, n, conv->D, job->conv_width, KDA_SILU);
}

/* The last raw inputs of tokens [t0, t1) of sequence n become its history. */
static void keep_history(const struct kda_job *job, const struct kda_short_conv *conv, const struct kda_tensor *x,
                         ptrdiff_t n, ptrdiff_t row, ptrdiff_t t0, ptrdiff_t t1, ptrdiff_t head, ptrdiff_t j0,
                         ptrdiff_t c0, ptrdiff_t channels) {
    ptrdiff_t past = job->conv_width - 1;
    for (ptrdiff_t w = 0; w < past; w++) { /* oldest first: in place, a row is read before it is overwritten */
        ptrdiff_t from = t1 - past + w;
        float *next = history(conv, &conv->next, job->rows.next, n, w, c0);
        if (from >= t0) {
            get_f32(job->isa, x->dtype, next, at(x, row, from, head, j0), channels);
        } else {
            const float *kept = history(conv, &conv->past, job->rows.past, n, past + from - t0, c0);
            if (kept != next) memcpy(next, kept, (size_t)channels * sizeof *next);
        }
    }
}

int kda_history_is_shared(const struct kda_job *job) {
    return job->conv_width > 1 && (job->HV > job->H || job->splits > 1);
}

void kda_keep_shared_histories(const struct kda_job *job) {
    for (ptrdiff_t n = 0; n < job->N; n++) {
        ptrdiff_t row, t0, t1, K = job->K;
        span(job->cu_seqlens, n, job->T, &row, &t0, &t1);
        for (ptrdiff_t h = 0; h < job->H; h++) {
            keep_history(job, &job->conv_q, &job->q, n, row, t0, t1, h, 0, h * K, K);
            keep_history(job, &job->conv_k, &job->k, n, row, t0, t1, h, 0, h * K, K);
        }
    }
}

/* Tokens [t, t + tokens): q, k, v, decay and beta as the kernels want them, in scratch. */
static void prepare_block(const struct kda_job *job, const struct delta_item *it, ptrdiff_t t, ptrdiff_t tokens) {
    const struct kda_kernels *isa = job->isa;
    ptrdiff_t K = job->K;
    if (job->conv_width) {
        ptrdiff_t c_qk = it->h * K, c_v = it->hv * job->V + it->j0;
        convolve(job, &job->conv_q, &job->q, it, t, tokens, it->h, 0, c_qk, K, it->q, K);
        convolve(job, &job->conv_k, &job->k, it, t, tokens, it->h, 0, c_qk, K, it->k, K);
        convolve(job, &job->conv_v, &job->v, it, t, tokens, it->hv, it->j0, c_v, it->columns, it->v, it->ld);
    }
    for (ptrdiff_t i = 0; i < tokens; i++) {
        ptrdiff_t row = it->row, now = t + i, ahead = now + AHEAD;
        prefetch_row(&job->o, at(&job->o, row, now, it->hv, it->j0), it->columns); /* written after the block */
        if (ahead < it->t1) {
            prefetch_row(&job->q, at(&job->q, row, ahead, it->h, 0), K);
            prefetch_row(&job->k, at(&job->k, row, ahead, it->h, 0), K);
            prefetch_row(&job->g, at(&job->g, row, ahead, it->hv, 0), K);
            prefetch_row(&job->v, at(&job->v, row, ahead, it->hv, it->j0), it->columns);
        }
        float *q_out = it->q + i * K, *k_out = it->k + i * K, *decay = it->decay + i * K;
        const float *q = q_out, *k = k_out;
        if (!job->conv_width) {
            q = as_f32(isa, job->q.dtype, at(&job->q, row, now, it->h, 0), q_out, K);
            k = as_f32(isa, job->k.dtype, at(&job->k, row, now, it->h, 0), k_out, K);
            get_f32(isa, job->v.dtype, it->v + i * it->ld, at(&job->v, row, now, it->hv, it->j0), it->columns);
        }
        const float *g = log_decay(job, at(&job->g, row, now, it->hv, 0), it->hv, it->ea, decay);
        isa->prepare(q_out, k_out, decay, q, k, g, job->scale, job->eps, K);
        it->beta[i] = prepare_beta(job, at(&job->beta, row, now, it->hv, 0));
    }
}

/* The outputs of the same tokens, through the gated norm if there is one, to where they belong. */
static void finish_block(const struct kda_job *job, const struct delta_item *it, ptrdiff_t t, ptrdiff_t tokens) {
    const struct kda_kernels *isa = job->isa;
    for (ptrdiff_t i = 0; i < tokens; i++) {
        float *o = it->o + i * it->ld;
        if (job->o_gate.data) {
            const void *at_gate = at(&job->o_gate, it->row, t + i, it->hv, 0);
            const float *gate = as_f32(isa, job->o_gate.dtype, at_gate, it->v, job->V); /* v is done with */
            isa->norm_gated(o, o, gate, job->norm_weight, job->norm_eps, job->V, job->norm_activation);
        }
        put_f32(isa, job->o.dtype, (void *)at(&job->o, it->row, t + i, it->hv, it->j0), o, it->columns);
    }
}

/* Where an item's columns of a state lie. */
static void *state_at(const struct kda_job *job, const struct kda_tensor *s, void *const *rows,
                      const struct delta_item *it) {
    if (!rows) return (void *)at(s, it->n, 0, it->hv, it->j0);
    ptrdiff_t offset = it->hv * job->K * job->V + it->j0;
    return (char *)rows[it->n] + offset * (job->s_dtype == KDA_F32 ? 4 : 2);
}

/* The state of one head while its item runs. */
struct head_state {
    void *kept;        /* where it stays, of the job's dtype */
    float *s;          /* where the kernels have it */
    const float *s_in; /* where the first step reads it */
    ptrdiff_t ld;
    const float *pending; /* the update that s_in lacks, or NULL */
    float *left;          /* where a step leaves its own */
    int keep;             /* the last token's stays there */
};

/* The updates of one head in what the caller keeps for them. */
static float *kept_update(const struct kda_job *job, float *const *rows, const struct delta_item *it) {
    ptrdiff_t n = KDA_PENDING(job->K, job->V);
    if (job->pending) return job->pending + (it->n * job->HV + it->hv) * n;
    return rows && rows[it->n] ? rows[it->n] + it->hv * n : NULL;
}

static struct head_state open_state(const struct kda_job *job, const struct delta_item *it, int thread) {
    ptrdiff_t K = job->K, V = job->V, tokens = it->t1 - it->t0;
    const void *from = job->rows.s_in || job->s_in.data ? state_at(job, &job->s_in, job->rows.s_in, it) : NULL;
    struct head_state h = {.kept = state_at(job, &job->s_out, job->rows.s_out, it), .s_in = from, .ld = V};
    h.s = h.kept;
    h.pending = kept_update(job, job->rows.pending, it);
    float *left = kept_update(job, job->rows.left, it);
    h.keep = left != NULL;
    h.left = left ? left : it->left;
    if (job->s_dtype != KDA_F32) {
        h.s = job->scratch + (thread + 1) * job->scratch_floats - K * padded(V);
        h.ld = it->ld;
        for (ptrdiff_t i = 0; i < K; i++)
            get_f32(job->isa, job->s_dtype, h.s + i * h.ld, (const uint16_t *)from + i * V, it->columns);
        h.s_in = h.s;
    } else if (h.s_in != h.s && (job->block > 1 || !h.s_in || !tokens || (tokens == 1 && h.keep && !h.pending))) {
        copy_state(h.s, h.s_in, K, it->columns, V); /* a step reads s_in itself; a block is in place */
        h.s_in = h.s;
    }
    if (h.pending && (job->block > 1 || (!tokens && h.left != h.pending))) {
        job->isa->settle(h.s, h.s_in, h.pending, K, it->columns, h.ld, h.ld);
        h.pending = NULL;
    }
    return h;
}

static void close_state(const struct kda_job *job, const struct delta_item *it, const struct head_state *h) {
    if (job->s_dtype == KDA_F32) return;
    for (ptrdiff_t i = 0; i < job->K; i++)
        put_f32(job->isa, job->s_dtype, (uint16_t *)h->kept + i * job->V, h->s + i * h->ld, it->columns);
}

static void keep_histories(const struct kda_job *job, const struct delta_item *it) {
    ptrdiff_t K = job->K;
    keep_history(job, &job->conv_v, &job->v, it->n, it->row, it->t0, it->t1, it->hv, it->j0,
                 it->hv * job->V + it->j0, it->columns);
    if (kda_history_is_shared(job)) return;
    keep_history(job, &job->conv_q, &job->q, it->n, it->row, it->t0, it->t1, it->h, 0, it->h * K, K);
    keep_history(job, &job->conv_k, &job->k, it->n, it->row, it->t0, it->t1, it->h, 0, it->h * K, K);
}

/* Tokens [t, t + tokens) of one head. */
static void run_tokens(const struct kda_job *job, const struct delta_item *it, struct head_state *h, ptrdiff_t t,
                       ptrdiff_t tokens) {
    const struct kda_kernels *isa = job->isa;
    ptrdiff_t K = job->K;
    prepare_block(job, it, t, tokens);
    if (job->block == 1) {
        /* The next token makes this one's update in its own pass. Not out of a state that must stay as it is. */
        int put_off = t + 1 < it->t1 ? h->pending || h->s_in == h->s : h->keep;
        float *left = put_off ? h->left : NULL;
        isa->step(it->o, h->s, left, it->work, h->s_in, h->pending, it->q, it->k, it->v, it->decay, *it->beta, K,
                  it->columns, h->ld, h->ld);
        h->pending = left;
    } else {
        (job->flags & KDA_BF16_BLOCKS ? isa->block_bf16 : isa->block)(it->o, h->s, it->work, it->q, it->k, it->v,
                                                                      it->decay, it->beta, tokens, K, it->columns,
                                                                      it->ld, h->ld, it->ld);
    }
    h->s_in = h->s;
    finish_block(job, it, t, tokens);
}

void kda_delta_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_job *job = job_;
    struct delta_item its[KDA_GROUP];
    struct head_state states[KDA_GROUP];
    ptrdiff_t split = item % job->splits, group = item / job->splits, heads = 0;
    ptrdiff_t hv = group % head_groups(job) * job->group,
              end = hv + job->group < job->HV ? hv + job->group : job->HV;
    const struct delta_item *it = its; /* all have the same tokens */
    for (ptrdiff_t n = group / head_groups(job); heads == 0 || hv < end; hv++, heads++) {
        its[heads] = delta_item(job, (n * job->HV + hv) * job->splits + split, thread);
        if (its[heads].columns <= 0) return;
        states[heads] = open_state(job, &its[heads], thread);
    }

    ptrdiff_t tokens = 0, checkpoint = job->states.data ? (it->t0 - it->start) / job->spacing : 0;
    for (ptrdiff_t t = it->t0; t < it->t1; t += tokens) {
        tokens = it->t1 - t < job->block ? it->t1 - t : job->block;
        ptrdiff_t left = job->states.data ? job->spacing - (t - it->start) % job->spacing : tokens;
        if (left < tokens) tokens = left; /* blocks end where a state is wanted */
        for (ptrdiff_t i = 0; i < heads; i++) {
            run_tokens(job, &its[i], &states[i], t, tokens);
            if (job->states.data && left == tokens)
                copy_state((float *)at(&job->states, it->n, checkpoint, its[i].hv, it->j0), states[i].s, job->K,
                           it->columns, job->V);
        }
        checkpoint += job->states.data && left == tokens;
    }
    for (ptrdiff_t i = 0; i < heads; i++) {
        close_state(job, &its[i], &states[i]);
        if (job->conv_width) keep_histories(job, &its[i]);
    }
}

void kda_settle_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_job *job = job_;
    (void)thread;
    float *s = (float *)at(&job->s_out, item / job->HV, 0, item % job->HV, 0);
    const float *pending = job->pending + item * KDA_PENDING(job->K, job->V);
    job->isa->settle(s, s, pending, job->K, job->V, job->V, job->V);
}

/* ---- its gradients ---- */

/* The states before each token of a block, and at the start of each block of a segment between two checkpoints; a
 * gradient row; the kernel's work. */
static ptrdiff_t backward_work(const struct kda_job *job) {
    ptrdiff_t blocks = (job->spacing + job->block - 1) / job->block;
    return (job->block + blocks) * job->K * job->V + 2 * padded(job->V) + padded(3 * job->K) +
           padded(2 * job->K + 3 * job->V);
}

ptrdiff_t kda_backward_scratch(const struct kda_job *job) {
    return padded(kda_delta_scratch(job)) + backward_work(job);
}

/* One token back through the step and what was before it. s: the state before it. */
static void token_backward(const struct kda_backward_job *job, const struct delta_item *it, ptrdiff_t t,
                           ptrdiff_t i, float *ds, const float *s, float *row, float *work) {
    const struct kda_job *forward = &job->forward;
    const struct kda_kernels *isa = forward->isa;
    ptrdiff_t K = forward->K, V = forward->V, hv = it->hv;
    float *dq = (float *)at(&job->dq, it->row, t, hv, 0), *dk = (float *)at(&job->dk, it->row, t, hv, 0);
    float *dg = (float *)at(&job->dg, it->row, t, hv, 0), *dv = (float *)at(&job->dv, it->row, t, hv, 0);
    float *dbeta = (float *)at(&job->dbeta, it->row, t, hv, 0), *da = (float *)at(&job->da, it->row, t, hv, 0);
    const float *d_o = as_f32(isa, job->d_o.dtype, at(&job->d_o, it->row, t, hv, 0), row, V);
    float beta = it->beta[i];
    *dbeta = isa->step_backward(dq, dk, dg, dv, ds, work, s, it->q + i * K, it->k + i * K, it->v + i * it->ld,
                                it->decay + i * K, d_o, beta, K, V, V, V);
    const float *q = as_f32(isa, forward->q.dtype, at(&forward->q, it->row, t, it->h, 0), row, K);
    const float *k = as_f32(isa, forward->k.dtype, at(&forward->k, it->row, t, it->h, 0), row + K, K);
    isa->prepare_backward(dq, dk, q, k, forward->scale, forward->eps, K);
    *da = 0.0f;
    if (forward->flags & KDA_GATE) {
        const float *g = as_f32(isa, forward->g.dtype, at(&forward->g, it->row, t, hv, 0), row, K);
        const float *bias = forward->dt_bias ? forward->dt_bias + hv * K : NULL;
        kda_gate_backward_fn *gate =
            forward->flags & KDA_BOUNDED ? isa->gate_bounded_backward : isa->gate_softplus_backward;
        *da = gate(dg, g, bias, it->ea, forward->lower_bound, K);
    }
    if (forward->flags & KDA_BETA_SIGMOID) /* beta = most * sigmoid */
        *dbeta *= beta * (1.0f - beta / (forward->flags & KDA_NEG_EIGVAL ? 2.0f : 1.0f));
}

/* The segments between two checkpoints from the last to the first: forward by blocks to keep the state at each
 * block's start, then each block from the last: forward by steps to keep the state before each token, then back. */
void kda_backward_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_backward_job *job = job_;
    const struct kda_job *forward = &job->forward;
    const struct kda_kernels *isa = forward->isa;
    const struct delta_item it = delta_item(forward, item, thread);
    ptrdiff_t K = forward->K, V = forward->V, size = K * V, block = forward->block;
    float *before = it.q + padded(kda_delta_scratch(forward)), *starts = before + block * size;
    float *row = starts + (forward->spacing + block - 1) / block * size;
    float *work = row + 2 * padded(V) + padded(3 * K);

    float *ds = (float *)at(&job->ds_out, it.n, 0, it.hv, 0);
    ptrdiff_t last = it.t1 > it.t0 ? (it.t1 - it.t0 - 1) / forward->spacing : 0;
    if (job->from <= last && last < job->to)
        copy_state(ds, job->ds_in.data ? at(&job->ds_in, it.n, 0, it.hv, 0) : NULL, K, V, V);
    if (it.t1 == it.t0) return;
    for (ptrdiff_t segment = last < job->to ? last : job->to - 1; segment >= job->from; segment--) {
        ptrdiff_t from = it.t0 + segment * forward->spacing, blocks = 0;
        ptrdiff_t to = it.t1 - from < forward->spacing ? it.t1 : from + forward->spacing;
        const float *s_in = forward->s_in.data ? at(&forward->s_in, it.n, 0, it.hv, 0) : NULL;
        if (segment) s_in = at(&forward->states, it.n, segment - 1, it.hv, 0);
        copy_state(starts, s_in, K, V, V);
        for (ptrdiff_t t = from; t + block < to; t += block, blocks++) {
            float *next = starts + (blocks + 1) * size;
            prepare_block(forward, &it, t, block);
            copy_state(next, starts + blocks * size, K, V, V);
            isa->block(it.o, next, it.work, it.q, it.k, it.v, it.decay, it.beta, block, K, V, it.ld, V, it.ld);
        }
        for (; blocks >= 0; blocks--) {
            ptrdiff_t t = from + blocks * block, tokens = to - t < block ? to - t : block;
            prepare_block(forward, &it, t, tokens);
            memcpy(before, starts + blocks * size, (size_t)size * sizeof *before);
            for (ptrdiff_t i = 0; i + 1 < tokens; i++)
                isa->step(it.o, before + (i + 1) * size, NULL, work, before + i * size, NULL, it.q + i * K,
                          it.k + i * K, it.v + i * it.ld, it.decay + i * K, it.beta[i], K, V, V, V);
            for (ptrdiff_t i = tokens - 1; i >= 0; i--)
                token_backward(job, &it, t + i, i, ds, before + i * size, row, work);
        }
    }
}

void kda_gate_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_job *job = job_;
    (void)thread;
    ptrdiff_t t = item % job->T, b = item / job->T;
    for (ptrdiff_t hv = 0; hv < job->HV; hv++)
        log_decay(job, at(&job->g, b, t, hv, 0), hv, gate_factor(job, hv), (float *)at(&job->o, b, t, hv, 0));
}

void kda_l2norm_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_job *job = job_;
    ptrdiff_t t = item % job->T, b = item / job->T;
    for (ptrdiff_t h = 0; h < job->H; h++) {
        void *y_at = (void *)at(&job->o, b, t, h, 0);
        float *y = job->o.dtype == KDA_F32 ? y_at : job->scratch + thread * job->scratch_floats;
        job->isa->l2norm(y, as_f32(job->isa, job->q.dtype, at(&job->q, b, t, h, 0), y, job->K), job->eps, job->K);
        put_f32(job->isa, job->o.dtype, y_at, y, job->K);
    }
}

/* ---- the epilogues ---- */

void kda_norm_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_norm_job *job = job_;
    const struct kda_kernels *isa = job->isa;
    ptrdiff_t t = item % job->T, b = item / job->T, n = job->n;
    float *x_row = job->scratch + thread * job->scratch_floats, *gate_row = x_row + n, *y_row = gate_row + n;
    for (ptrdiff_t h = 0; h < job->H; h++) {
        const float *x = as_f32(isa, job->x.dtype, at(&job->x, b, t, h, 0), x_row, n);
        const float *gate = as_f32(isa, job->gate.dtype, at(&job->gate, b, t, h, 0), gate_row, n);
        void *y_at = (void *)at(&job->y, b, t, h, 0);
        float *y = job->y.dtype == KDA_F32 ? y_at : y_row;
        isa->norm_gated(y, x, gate, job->weight, job->eps, n, job->activation);
        put_f32(isa, job->y.dtype, y_at, y, n);
    }
}

static ptrdiff_t conv_blocks(const struct kda_conv_job *job) {
    return (job->D + KDA_CONV_CHANNELS - 1) / KDA_CONV_CHANNELS;
}

ptrdiff_t kda_conv_items(const struct kda_conv_job *job) { return job->N * conv_blocks(job); }

/* the history, and the widened x and unrounded y of 16-bit arrays; rows of KDA_CONV_CHANNELS */
ptrdiff_t kda_conv_scratch(const struct kda_conv_job *job) {
    ptrdiff_t rows = 2 * (job->width - 1); /* from the state; and the one that follows it */
    if (job->x.dtype != KDA_F32) rows += job->width - 1 + KDA_CONV_TOKENS;
    if (job->y.dtype != KDA_F32) rows += KDA_CONV_TOKENS;
    return rows * KDA_CONV_CHANNELS;
}

void kda_conv_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_conv_job *job = job_;
    const struct kda_kernels *isa = job->isa;
    ptrdiff_t blocks = conv_blocks(job), n = item / blocks, c0 = item % blocks * KDA_CONV_CHANNELS;
    ptrdiff_t channels = job->D - c0 < KDA_CONV_CHANNELS ? job->D - c0 : KDA_CONV_CHANNELS, past = job->width - 1;
    ptrdiff_t row, t0, t1;
    span(job->cu_seqlens, n, job->T, &row, &t0, &t1);
    ptrdiff_t from = t0 + job->from, to = t1,
              ends = t1 > t0 ? t1 : t0 + 1; /* an empty one ends in the first part */
    if (job->to && t0 + job->to < t1) to = t0 + job->to;

    float *history = job->scratch + thread * job->scratch_floats, *kept = history + past * KDA_CONV_CHANNELS;
    float *x_rows = kept + past * KDA_CONV_CHANNELS;
    float *y_rows = x_rows + (job->x.dtype == KDA_F32 ? 0 : past + KDA_CONV_TOKENS) * KDA_CONV_CHANNELS;
    for (ptrdiff_t w = 0; w < past; w++)
        for (ptrdiff_t c = 0; c < channels; c++)
            history[w * KDA_CONV_CHANNELS + c] =
                job->state_in ? job->state_in[n * job->in_batch + (c0 + c) * job->in_channel + w * job->in_tap]
                              : 0.0f;

    const float *rows[KDA_CONV_MAX - 1 + KDA_CONV_TOKENS];
    float *y[KDA_CONV_TOKENS];
    for (ptrdiff_t t = from; t < to; t += KDA_CONV_TOKENS) {
        ptrdiff_t tokens = to - t < KDA_CONV_TOKENS ? to - t : KDA_CONV_TOKENS;
        for (ptrdiff_t i = 0; i < past + tokens; i++) {
            ptrdiff_t of = t - past + i;
            rows[i] = of < t0 ? history + (past + of - t0) * KDA_CONV_CHANNELS
                              : as_f32(isa, job->x.dtype, at(&job->x, row, of, 0, c0),
                                       x_rows + i * KDA_CONV_CHANNELS, channels);
        }
        for (ptrdiff_t i = 0; i < tokens; i++)
            y[i] =
                job->y.dtype == KDA_F32 ? (float *)at(&job->y, row, t + i, 0, c0) : y_rows + i * KDA_CONV_CHANNELS;
        isa->conv(y, rows, job->taps + c0, job->bias ? job->bias + c0 : NULL, tokens, channels, job->D, job->width,
                  job->activation);
        for (ptrdiff_t i = 0; i < tokens; i++)
            put_f32(isa, job->y.dtype, (void *)at(&job->y, row, t + i, 0, c0), y[i], channels);
    }

    if (!job->state_out || ends <= from || (job->to && ends > t0 + job->to)) return;
    for (ptrdiff_t w = 0; w < past; w++) { /* the last raw inputs; older ones come from the history */
        ptrdiff_t of = t1 - past + w;
        const float *x = of < t0 ? history + (past + of - t0) * KDA_CONV_CHANNELS
                                 : as_f32(isa, job->x.dtype, at(&job->x, row, of, 0, c0), kept, channels);
        for (ptrdiff_t c = 0; c < channels; c++)
            job->state_out[n * job->out_batch + (c0 + c) * job->out_channel + w * job->out_tap] = x[c];
    }
}

void kda_conv_step_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_conv_job *job = job_;
    const struct kda_kernels *isa = job->isa;
    ptrdiff_t blocks = conv_blocks(job), n = item / blocks, c0 = item % blocks * KDA_CONV_CHANNELS;
    ptrdiff_t channels = job->D - c0 < KDA_CONV_CHANNELS ? job->D - c0 : KDA_CONV_CHANNELS;
    float *x_row = job->scratch + thread * job->scratch_floats, *y_row = x_row + KDA_CONV_CHANNELS;
    const float *x = as_f32(isa, job->x.dtype, at(&job->x, n, 0, 0, c0), x_row, channels);
    void *y_at = (void *)at(&job->y, n, 0, 0, c0);
    float *y = job->y.dtype == KDA_F32 ? y_at : y_row;
    isa->conv_step(y, job->state_out + (n * job->D + c0) * (job->width - 1), x, job->taps + c0 * job->width,
                   job->bias ? job->bias + c0 : NULL, channels, job->width, job->activation);
    put_f32(isa, job->y.dtype, y_at, y, channels);
}
