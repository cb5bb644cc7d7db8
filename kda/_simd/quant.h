/* Group-quantised matrices as jobs: packing, unpacking, quantising, multiplying. kda_task_fn, all of them. */
#ifndef KDA_QUANT_H
#define KDA_QUANT_H
#include "jobs.h"

/* N rows of K weights in groups of `group`; K is padded with zeros to groups * group. Packed as kernels.h says:
 * codes [tiles][groups * group / (8 / bits)][lanes], scales [tiles][groups][lanes]. */
struct kda_matrix {
    const struct kda_kernels *isa;
    uint8_t *codes;
    uint16_t *scales;
    ptrdiff_t N, K, groups, group;
    int bits; /* 8 or 4 */
};

ptrdiff_t kda_matrix_tiles(const struct kda_matrix *m);
ptrdiff_t kda_matrix_tile_bytes(const struct kda_matrix *m);

/* Canonical form: codes int8 [N, groups * group], or two codes plus 8 in a byte, low nibble first; scales float16
 * [N, groups]. One item is one tile. */
struct kda_pack_job {
    struct kda_matrix m;
    uint8_t *codes; /* rows `ld_codes` bytes apart */
    uint16_t *scales;
    ptrdiff_t ld_codes, ld_scales;
};
void kda_pack_item(const void *job, ptrdiff_t item, int thread);
void kda_unpack_item(const void *job, ptrdiff_t item, int thread);

/* From weights [N, K] of any dtype, rows `w.batch` elements apart. bad[tile]: -1, or row * groups + group of the
 * first group that has no float16 scale (NaN, infinite or too large). */
struct kda_encode_job {
    struct kda_matrix m;
    struct kda_tensor w;
    int64_t *bad;
    float *scratch; /* per thread: a row, its scales twice, its codes */
    ptrdiff_t scratch_floats;
};
ptrdiff_t kda_encode_scratch(const struct kda_matrix *m);
void kda_encode_item(const void *job, ptrdiff_t item, int thread);

/* y [T, N] = x [T, K] times the matrix, rows `y.batch` and `x.batch` elements apart. First one item per block of
 * tokens quantises x into the three arrays, then one item per chunk of tiles multiplies. */
struct kda_idot_job {
    struct kda_matrix m;
    struct kda_tensor x;
    float *y;
    ptrdiff_t T, ld_y;
    int8_t *x_codes; /* [T * groups * group] */
    float *x_scales; /* [T * groups] */
    int32_t *x_sums; /* [T * groups] */
    float *scratch;  /* per thread: a row of x and its codes */
    ptrdiff_t scratch_floats;
};
ptrdiff_t kda_idot_scratch(const struct kda_matrix *m);
ptrdiff_t kda_idot_blocks(const struct kda_idot_job *job);
ptrdiff_t kda_idot_chunks(const struct kda_idot_job *job);
void kda_idot_quantize_item(const void *job, ptrdiff_t item, int thread);
void kda_idot_item(const void *job, ptrdiff_t item, int thread);

#endif
