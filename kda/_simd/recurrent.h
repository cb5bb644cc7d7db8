/* fused_recurrent_kda, fused_kda_gate and l2norm as jobs of independent items: what the Cython layer
 * fills in and hands to kda_parallel_for. */
#ifndef KDA_RECURRENT_H
#define KDA_RECURRENT_H
#include "kernels.h"

enum { KDA_F32 = 0, KDA_F16 = 1, KDA_BF16 = 2 };

/* [batch, tokens, heads, n] with n contiguous; strides in elements, any sign. */
struct kda_tensor {
    void *data;
    ptrdiff_t batch, token, head;
    int dtype;
};

enum {
    KDA_L2NORM = 1 << 0,       /* normalise q and k */
    KDA_GATE = 1 << 1,         /* g holds raw logits */
    KDA_BOUNDED = 1 << 2,      /* the gate's formula: lower_bound was given */
    KDA_BETA_SIGMOID = 1 << 3, /* beta holds raw logits */
    KDA_NEG_EIGVAL = 1 << 4    /* beta * 2 */
};

struct kda_job {
    const struct kda_kernels *isa;
    struct kda_tensor o, q, k, v, g, beta;
    struct kda_tensor s_out, s_in; /* [N, HV, K, V] float32, a head contiguous; s_in.data NULL: zeros */
    const float *A_log, *dt_bias;  /* [HV], [HV, K]; NULL: none */
    const int64_t *cu_seqlens;     /* [N + 1], or NULL: sequence n is batch row n, T tokens */
    ptrdiff_t N, T, H, HV, K, V;
    ptrdiff_t splits; /* column blocks per head */
    float scale, lower_bound, eps;
    int flags;
    float *scratch; /* kda_scratch_floats(job) floats per thread */
};

ptrdiff_t kda_items(const struct kda_job *job);
ptrdiff_t kda_scratch_floats(const struct kda_job *job);

/* One column block of one value head of one sequence, all its tokens. A kda_task_fn. */
void kda_recurrent_item(const void *job, ptrdiff_t item, int thread);

/* One (batch row, token, head) of g into o, as log decay. A kda_task_fn. */
void kda_gate_item(const void *job, ptrdiff_t item, int thread);

/* One (batch row, token, head) of q into o, normalised. A kda_task_fn. */
void kda_l2norm_item(const void *job, ptrdiff_t item, int thread);

#endif
