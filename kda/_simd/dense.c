/* Moves dense weights into panels and hands panels to the ISA's kernel. */
#include "dense.h"

enum { CHUNK = 4 }; /* panels of an item: they share the tokens that one pass brings near */

ptrdiff_t kda_dense_panels(const struct kda_dense_job *job) {
    return (job->N + job->isa->dense_lanes - 1) / job->isa->dense_lanes;
}

ptrdiff_t kda_dense_chunks(const struct kda_dense_job *job) { return (kda_dense_panels(job) + CHUNK - 1) / CHUNK; }

void kda_dense_pack_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_dense_job *job = job_;
    const struct kda_tensor *w = &job->w;
    ptrdiff_t lanes = job->isa->dense_lanes, K = job->K;
    float *panel = job->panels + item * lanes * K, *row = job->scratch + thread * job->scratch_floats;
    for (ptrdiff_t r = 0; r < lanes; r++) {
        ptrdiff_t from = item * lanes + r - job->first;
        if (from >= 0 && from < job->rows) {
            const char *at = (const char *)w->data + from * w->batch * (w->dtype == KDA_F32 ? 4 : 2);
            const float *values = (const float *)(const void *)at;
            if (w->dtype != KDA_F32) {
                const uint16_t *halves = (const uint16_t *)(const void *)at;
                (w->dtype == KDA_F16 ? job->isa->widen_f16 : job->isa->widen_bf16)(row, halves, K);
                values = row;
            }
            for (ptrdiff_t k = 0; k < K; k++) panel[k * lanes + r] = values[k];
        } else if (item * lanes + r >= job->N) {
            for (ptrdiff_t k = 0; k < K; k++) panel[k * lanes + r] = 0.0f;
        }
    }
}

void kda_dense_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_dense_job *job = job_;
    ptrdiff_t lanes = job->isa->dense_lanes, first = item * CHUNK * lanes;
    ptrdiff_t rows = job->N - first < CHUNK * lanes ? job->N - first : CHUNK * lanes;
    (void)thread;
    job->isa->dense(job->y + first, job->panels + first * job->K, job->x, job->T, rows, job->K, job->ld_x,
                    job->ld_y);
}
