/* The operations as jobs of independent items: what the Cython layer fills in and hands to
 * kda_parallel_for. */
#ifndef KDA_JOBS_H
#define KDA_JOBS_H
#include "kernels.h"

enum { KDA_F32 = 0, KDA_F16 = 1, KDA_BF16 = 2 };

/* [batch, token, head, n] with n contiguous; strides in elements, any sign. */
struct kda_tensor {
    void *data;
    ptrdiff_t batch, token, head;
    int dtype;
};

enum {
    KDA_GATE = 1 << 0,         /* g holds raw logits */
    KDA_BOUNDED = 1 << 1,      /* the gate's formula: lower_bound was given */
    KDA_BETA_SIGMOID = 1 << 2, /* beta holds raw logits */
    KDA_NEG_EIGVAL = 1 << 3,   /* beta * 2 */
    KDA_BF16_BLOCKS = 1 << 4   /* block_bf16 for block */
};

/* A short convolution in front of the delta rule, with SiLU: taps [width, D], tap by tap; the raw inputs before the
 * first token and after the last, [N, width - 1, D] float32 with the channels contiguous. next may be past. */
struct kda_short_conv {
    const float *taps;
    ptrdiff_t D;
    ptrdiff_t start; /* of this convolution in a kda_rows history */
    struct kda_tensor past, next;
};

/* States that are not rows of one array: sequence n's lies at s_in[n] and s_out[n], [HV, K, V], and its three
 * histories at past[n] and next[n]. In and out may be the same. pending[n]: [HV, KDA_PENDING(K, V)], the updates
 * that s_in lacks, or NULL; left[n]: NULL, or where those of the last token go, which s_out then lacks. */
struct kda_rows {
    void **s_in, **s_out;
    float **past, **next;
    float **pending, **left;
};

/* Rows of neighbouring heads lie side by side: taken together, a page is walked to once for all of them. */
enum { KDA_GROUP = 4 };

/* The delta rule over whole sequences, with what a layer puts around it; fused_kda_gate and l2norm. */
struct kda_job {
    const struct kda_kernels *isa;
    struct kda_tensor o, q, k, v, g, beta;
    struct kda_tensor s_out, s_in; /* [N, -, HV, K V], a head contiguous; s_in.data NULL: zeros */
    struct kda_rows rows;          /* rows.s_out not NULL: instead of s_out, s_in, past and next */
    float *pending;           /* [N, HV, KDA_PENDING(K, V)]: what s_in lacks, and then what s_out lacks; or NULL */
    int s_dtype;              /* KDA_F32, or KDA_BF16: rounded at the end of the call */
    struct kda_tensor states; /* [N, checkpoint, HV, K V] float32; data NULL: none wanted */
    const float *A_log, *dt_bias; /* [HV], [HV, K]; NULL: none */
    const int64_t *cu_seqlens;    /* [N + 1], or NULL: sequence n is batch row n, T tokens */
    ptrdiff_t N, T, H, HV, K, V;
    ptrdiff_t from, to; /* which tokens of each sequence, where a call is run in parts; to 0: all. Without conv. A
                           part begins where a block would, and reads the states that the one before it wrote. */
    ptrdiff_t block;    /* tokens taken together: 1 (the step) or KDA_BLOCK */
    ptrdiff_t spacing;  /* tokens between two checkpoints of `states` */
    ptrdiff_t
        group; /* heads of an item, 1 to KDA_GROUP, block after block in turn; 1 where s_dtype is not KDA_F32 */
    ptrdiff_t splits; /* column blocks per head; 1 with o_gate, which needs whole rows, and with updates left */
    float scale, lower_bound;
    float eps; /* of the l2norm of q and k; < 0: none */
    int flags;
    int conv_width; /* 0: q, k, v come as they are */
    struct kda_short_conv conv_q, conv_k, conv_v;
    struct kda_tensor o_gate; /* the gated norm of o, [B, T, HV, V]; data NULL: none */
    const float *norm_weight; /* [V] */
    float norm_eps;
    int norm_activation;
    float *scratch; /* `scratch_floats` per thread, each starting on a cache line */
    ptrdiff_t scratch_floats;
};

ptrdiff_t kda_delta_items(const struct kda_job *job);
ptrdiff_t kda_delta_scratch(const struct kda_job *job);

/* kda_task_fn, all of them.
 * delta: one column block of one value head of one sequence, all its tokens.
 * settle: the pending update of one value head of s_out.
 * gate: one token of g into o, as log decay.  l2norm: one token of q into o. */
void kda_delta_item(const void *job, ptrdiff_t item, int thread);
void kda_settle_item(const void *job, ptrdiff_t item, int thread);

/* The items of one q/k head share its history where it has several value heads or columns are split. Then they
 * leave it alone, and this, after all of them, moves it on. */
int kda_history_is_shared(const struct kda_job *job);
void kda_keep_shared_histories(const struct kda_job *job);

void kda_gate_item(const void *job, ptrdiff_t item, int thread);
void kda_l2norm_item(const void *job, ptrdiff_t item, int thread);

/* Gradients of the delta rule, given that by o (d_o, shaped as o) and by the final state (ds_in; data NULL: zeros).
 * The forward job has block = KDA_BLOCK, splits = 1, no conv and no o_gate; s_in and `states` are read, states the
 * result of the forward pass at this spacing; o and s_out are not used. Results are float32 and per value head: dq,
 * dk, dg [B, T, HV, K], dv [B, T, HV, V], dbeta and da (the share of each token in the gradient by A_log) [B, T,
 * HV], ds_out [N, -, HV, K V]. */
struct kda_backward_job {
    struct kda_job forward;
    struct kda_tensor d_o, ds_in, dq, dk, dv, dg, dbeta, da, ds_out;
    ptrdiff_t from,
        to; /* which segments of `spacing` tokens of each sequence; parts go from the last to the first */
};
ptrdiff_t kda_backward_scratch(const struct kda_job *job);
void kda_backward_item(const void *job, ptrdiff_t item, int thread); /* one value head of one sequence */

/* The gated norm: y, x, gate [batch, token, head, n]. */
struct kda_norm_job {
    const struct kda_kernels *isa;
    struct kda_tensor y, x, gate;
    const float *weight;
    ptrdiff_t T, H, n;
    float eps;
    int activation;
    float *scratch;
    ptrdiff_t scratch_floats; /* 3 n */
};
void kda_norm_item(const void *job, ptrdiff_t item, int thread); /* one token */

/* The short convolution: y, x [batch, token, -, D]; channels in blocks. */
enum { KDA_CONV_CHANNELS = 512, KDA_CONV_TOKENS = 32 };
struct kda_conv_job {
    const struct kda_kernels *isa;
    struct kda_tensor y, x;
    const float *taps; /* [width, D] */
    const float *bias; /* [D] or NULL */
    float *state_out;  /* [N, D, width - 1] in these strides, or NULL */
    ptrdiff_t out_batch, out_channel, out_tap;
    const float *state_in; /* the same, or NULL: zeros; may be state_out */
    ptrdiff_t in_batch, in_channel, in_tap;
    const int64_t *cu_seqlens;
    ptrdiff_t N, T, D;
    ptrdiff_t from, to; /* which tokens of each sequence, where a call is run in parts; state_out is not state_in */
    int width, activation;
    float *scratch;
    ptrdiff_t scratch_floats; /* kda_conv_scratch */
};
ptrdiff_t kda_conv_items(const struct kda_conv_job *job);
ptrdiff_t kda_conv_scratch(const struct kda_conv_job *job);
void kda_conv_item(const void *job, ptrdiff_t item, int thread); /* one block of channels of one sequence */

/* One token, state in place, everything channel by channel: taps [D, width], state_out [N, D, width - 1]
 * contiguous. */
void kda_conv_step_item(const void *job, ptrdiff_t item, int thread);

#endif
