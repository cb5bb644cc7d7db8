/* Dense float32 matrices as jobs: packing and multiplying. kda_task_fn, both of them. */
#ifndef KDA_DENSE_H
#define KDA_DENSE_H
#include "jobs.h"

/* N rows of K weights in panels of isa->dense_lanes rows, [K][lanes] each; rows past N are zeros. */
struct kda_dense_job {
    const struct kda_kernels *isa;
    float *panels;
    ptrdiff_t N, K;
    struct kda_tensor
        w; /* packing: rows first .. first + rows of the matrix, `w.batch` elements apart, any dtype */
    ptrdiff_t first, rows;
    const float *x; /* multiplying: y [T, N] = x [T, K] times the matrix */
    float *y;
    ptrdiff_t T, ld_x, ld_y;
    float *scratch; /* packing: a row, per thread */
    ptrdiff_t scratch_floats;
};

ptrdiff_t kda_dense_panels(const struct kda_dense_job *job);
ptrdiff_t kda_dense_chunks(const struct kda_dense_job *job);
void kda_dense_pack_item(const void *job, ptrdiff_t item, int thread); /* one panel */
void kda_dense_item(const void *job, ptrdiff_t item, int thread);      /* one chunk of panels */

#endif
