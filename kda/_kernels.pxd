# kernels.h, threads.h and jobs.h as Cython sees them.
from libc.stdint cimport int64_t, uint32_t

cdef extern from "cpu.h" nogil:
    uint32_t kda_cpu_features() noexcept
    bint kda_permitted(uint32_t) noexcept

cdef extern from "kernels.h" nogil:
    enum:
        KDA_BLOCK
        KDA_CONV_MAX
        KDA_IDENTITY
        KDA_SIGMOID
        KDA_SILU

    struct kda_kernels:
        const char *name
        void *widen_f16
        void *widen_bf16
        void *narrow_f16
        void *narrow_bf16
        void *exp
        void *sigmoid
        void *softplus
        void *l2norm
        void *gate_softplus
        void *gate_bounded
        void *prepare
        void *step
        void *settle
        void *block
        void *block_bf16
        void *step_backward
        void *prepare_backward
        void *gate_softplus_backward
        void *gate_bounded_backward
        void *conv
        void *conv_step
        void *norm_gated
        void (*probe_update)(float *, float, float, Py_ssize_t) noexcept nogil
        Py_ssize_t (*probe_fma)(float *, Py_ssize_t) noexcept nogil
        float (*probe_read)(const float *, Py_ssize_t) noexcept nogil
        Py_ssize_t (*probe_idot)(float *, Py_ssize_t) noexcept nogil
        void *quantize
        void *amax
        void *encode
        void *idot_q8
        void *idot_q4
        int lanes
        int q8_bias
        int idot_tokens
        int idot_run
        void *dense
        int dense_lanes

    struct kda_isa:
        const kda_kernels *kernels
        uint32_t needs
        int runs_here

    kda_isa kda_isas[16]
    int kda_isa_count
    void kda_dispatch_init() noexcept
    const char *kda_compiler() noexcept
    const char *kda_flags() noexcept

cdef extern from "threads.h" nogil:
    ctypedef void kda_task_fn(const void *, Py_ssize_t, int) noexcept nogil
    enum:
        KDA_MAX_THREADS
    void kda_parallel_for(kda_task_fn *, const void *, Py_ssize_t, Py_ssize_t, int) noexcept
    void kda_set_thread_limit(int n) noexcept
    int kda_thread_limit() noexcept
    const char *kda_threading() noexcept

cdef extern from "jobs.h" nogil:
    enum:
        KDA_F32
        KDA_F16
        KDA_BF16
        KDA_GATE
        KDA_BOUNDED
        KDA_BETA_SIGMOID
        KDA_NEG_EIGVAL
        KDA_BF16_BLOCKS
        KDA_GROUP
        KDA_CONV_CHANNELS

    struct kda_tensor:
        void *data
        Py_ssize_t batch
        Py_ssize_t token
        Py_ssize_t head
        int dtype

    struct kda_short_conv:
        const float *taps
        Py_ssize_t D
        Py_ssize_t start
        kda_tensor past
        kda_tensor next

    struct kda_rows:
        void **s_in
        void **s_out
        float **past
        float **next
        float **pending
        float **left

    struct kda_job:
        const kda_kernels *isa
        kda_tensor o
        kda_tensor q
        kda_tensor k
        kda_tensor v
        kda_tensor g
        kda_tensor beta
        kda_tensor s_out
        kda_tensor s_in
        kda_rows rows
        float *pending
        int s_dtype
        kda_tensor states
        const float *A_log
        const float *dt_bias
        const int64_t *cu_seqlens
        Py_ssize_t N
        Py_ssize_t T
        Py_ssize_t H
        Py_ssize_t HV
        Py_ssize_t K
        Py_ssize_t V
        Py_ssize_t start "from"
        Py_ssize_t end "to"
        Py_ssize_t block
        Py_ssize_t spacing
        Py_ssize_t group
        Py_ssize_t splits
        float scale
        float lower_bound
        float eps
        int flags
        int conv_width
        kda_short_conv conv_q
        kda_short_conv conv_k
        kda_short_conv conv_v
        kda_tensor o_gate
        const float *norm_weight
        float norm_eps
        int norm_activation
        float *scratch
        Py_ssize_t scratch_floats

    Py_ssize_t kda_delta_items(const kda_job *) noexcept
    Py_ssize_t kda_delta_scratch(const kda_job *) noexcept
    void kda_delta_item(const void *, Py_ssize_t, int) noexcept
    void kda_settle_item(const void *, Py_ssize_t, int) noexcept
    int kda_history_is_shared(const kda_job *) noexcept
    void kda_keep_shared_histories(const kda_job *) noexcept
    void kda_gate_item(const void *, Py_ssize_t, int) noexcept
    void kda_l2norm_item(const void *, Py_ssize_t, int) noexcept

    struct kda_backward_job:
        kda_job forward
        kda_tensor d_o
        kda_tensor ds_in
        kda_tensor dq
        kda_tensor dk
        kda_tensor dv
        kda_tensor dg
        kda_tensor dbeta
        kda_tensor da
        kda_tensor ds_out
        Py_ssize_t start "from"
        Py_ssize_t end "to"

    Py_ssize_t kda_backward_scratch(const kda_job *) noexcept
    void kda_backward_item(const void *, Py_ssize_t, int) noexcept

    struct kda_norm_job:
        const kda_kernels *isa
        kda_tensor y
        kda_tensor x
        kda_tensor gate
        const float *weight
        Py_ssize_t T
        Py_ssize_t H
        Py_ssize_t n
        float eps
        int activation
        float *scratch
        Py_ssize_t scratch_floats

    void kda_norm_item(const void *, Py_ssize_t, int) noexcept

    struct kda_conv_job:
        const kda_kernels *isa
        kda_tensor y
        kda_tensor x
        const float *taps
        const float *bias
        float *state_out
        Py_ssize_t out_batch
        Py_ssize_t out_channel
        Py_ssize_t out_tap
        const float *state_in
        Py_ssize_t in_batch
        Py_ssize_t in_channel
        Py_ssize_t in_tap
        const int64_t *cu_seqlens
        Py_ssize_t N
        Py_ssize_t T
        Py_ssize_t D
        Py_ssize_t start "from"
        Py_ssize_t end "to"
        int width
        int activation
        float *scratch
        Py_ssize_t scratch_floats

    Py_ssize_t kda_conv_items(const kda_conv_job *) noexcept
    Py_ssize_t kda_conv_scratch(const kda_conv_job *) noexcept
    void kda_conv_item(const void *, Py_ssize_t, int) noexcept
    void kda_conv_step_item(const void *, Py_ssize_t, int) noexcept

cdef extern from "dense.h" nogil:
    struct kda_dense_job:
        const kda_kernels *isa
        float *panels
        Py_ssize_t N
        Py_ssize_t K
        kda_tensor w
        Py_ssize_t first
        Py_ssize_t rows
        const float *x
        float *y
        Py_ssize_t T
        Py_ssize_t ld_x
        Py_ssize_t ld_y
        float *scratch
        Py_ssize_t scratch_floats

    Py_ssize_t kda_dense_panels(const kda_dense_job *) noexcept
    Py_ssize_t kda_dense_chunks(const kda_dense_job *) noexcept
    void kda_dense_pack_item(const void *, Py_ssize_t, int) noexcept
    void kda_dense_item(const void *, Py_ssize_t, int) noexcept

cdef extern from "quant.h" nogil:
    struct kda_matrix:
        const kda_kernels *isa
        unsigned char *codes
        unsigned short *scales
        Py_ssize_t N
        Py_ssize_t K
        Py_ssize_t groups
        Py_ssize_t group
        int bits

    Py_ssize_t kda_matrix_tiles(const kda_matrix *) noexcept
    Py_ssize_t kda_matrix_tile_bytes(const kda_matrix *) noexcept

    struct kda_pack_job:
        kda_matrix m
        unsigned char *codes
        unsigned short *scales
        Py_ssize_t ld_codes
        Py_ssize_t ld_scales

    void kda_pack_item(const void *, Py_ssize_t, int) noexcept
    void kda_unpack_item(const void *, Py_ssize_t, int) noexcept

    struct kda_encode_job:
        kda_matrix m
        kda_tensor w
        int64_t *bad
        float *scratch
        Py_ssize_t scratch_floats

    Py_ssize_t kda_encode_scratch(const kda_matrix *) noexcept
    void kda_encode_item(const void *, Py_ssize_t, int) noexcept

    struct kda_idot_job:
        kda_matrix m
        kda_tensor x
        float *y
        Py_ssize_t T
        Py_ssize_t ld_y
        signed char *x_codes
        float *x_scales
        int *x_sums
        float *scratch
        Py_ssize_t scratch_floats

    Py_ssize_t kda_idot_scratch(const kda_matrix *) noexcept
    Py_ssize_t kda_idot_blocks(const kda_idot_job *) noexcept
    Py_ssize_t kda_idot_chunks(const kda_idot_job *) noexcept
    void kda_idot_quantize_item(const void *, Py_ssize_t, int) noexcept
    void kda_idot_item(const void *, Py_ssize_t, int) noexcept
