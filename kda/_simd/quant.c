/* Moves codes and scales between their canonical and their packed places, and walks tiles and blocks of
 * tokens. What is computed, the ISA's kernels compute. */
#include "quant.h"

#include <string.h>

enum { CHUNK = 4 }; /* tiles that a block of tokens meets in turn, while it is in the nearest cache */

static ptrdiff_t padded_k(const struct kda_matrix *m) { return m->groups * m->group; }

ptrdiff_t kda_matrix_tiles(const struct kda_matrix *m) { return (m->N + m->isa->lanes - 1) / m->isa->lanes; }

ptrdiff_t kda_matrix_tile_bytes(const struct kda_matrix *m) { return padded_k(m) * m->isa->lanes / (8 / m->bits); }

/* ---- packing ---- */

/* One row of codes (int8, one a byte) into lane r of a tile. */
static void place_row(const struct kda_matrix *m, uint8_t *tile, const int8_t *codes, ptrdiff_t r) {
    ptrdiff_t lanes = m->isa->lanes;
    if (m->bits == 8) {
        for (ptrdiff_t i = 0; i < padded_k(m); i += 4)
            for (ptrdiff_t j = 0; j < 4; j++)
                tile[i * lanes + 4 * r + j] = (uint8_t)(codes[i + j] + m->isa->q8_bias);
    } else {
        for (ptrdiff_t i = 0; i < padded_k(m); i += 8)
            for (ptrdiff_t j = 0; j < 4; j++)
                tile[i / 2 * lanes + 4 * r + j] = (uint8_t)((codes[i + j] + 8) | (codes[i + 4 + j] + 8) << 4);
    }
}

static int8_t taken_code(const struct kda_matrix *m, const uint8_t *tile, ptrdiff_t r, ptrdiff_t i) {
    ptrdiff_t lanes = m->isa->lanes;
    if (m->bits == 8) return (int8_t)(uint8_t)(tile[i / 4 * 4 * lanes + 4 * r + i % 4] - m->isa->q8_bias);
    int byte = tile[i / 8 * 4 * lanes + 4 * r + i % 4];
    return (int8_t)((i % 8 < 4 ? byte & 15 : byte >> 4) - 8);
}

static uint8_t *tile_codes(const struct kda_matrix *m, ptrdiff_t tile) {
    return m->codes + tile * kda_matrix_tile_bytes(m);
}

static uint16_t *tile_scales(const struct kda_matrix *m, ptrdiff_t tile) {
    return m->scales + tile * m->groups * m->isa->lanes;
}

/* Lanes past the last row: codes and scales of zero. */
static void blank_tile(const struct kda_matrix *m, ptrdiff_t tile) {
    if ((tile + 1) * m->isa->lanes <= m->N) return;
    memset(tile_codes(m, tile), m->bits == 8 ? m->isa->q8_bias : 0x88, (size_t)kda_matrix_tile_bytes(m));
    memset(tile_scales(m, tile), 0, (size_t)(m->groups * m->isa->lanes) * sizeof(uint16_t));
}

void kda_pack_item(const void *job_, ptrdiff_t tile, int thread) {
    const struct kda_pack_job *job = job_;
    const struct kda_matrix *m = &job->m;
    ptrdiff_t lanes = m->isa->lanes, first = tile * lanes;
    (void)thread;
    blank_tile(m, tile);
    for (ptrdiff_t r = 0; r < lanes && first + r < m->N; r++) {
        const uint8_t *codes = job->codes + (first + r) * job->ld_codes;
        if (m->bits == 8)
            place_row(m, tile_codes(m, tile), (const int8_t *)codes, r);
        else
            for (ptrdiff_t i = 0; i < padded_k(m); i += 8) { /* nibble pairs (0, 1) .. (6, 7) to (0, 4) .. (3, 7) */
                const uint8_t *b = codes + i / 2;
                uint8_t *to = tile_codes(m, tile) + i / 2 * lanes + 4 * r;
                to[0] = (uint8_t)((b[0] & 15) | (b[2] & 15) << 4);
                to[1] = (uint8_t)(b[0] >> 4 | (b[2] & 0xf0));
                to[2] = (uint8_t)((b[1] & 15) | (b[3] & 15) << 4);
                to[3] = (uint8_t)(b[1] >> 4 | (b[3] & 0xf0));
            }
        for (ptrdiff_t g = 0; g < m->groups; g++)
            tile_scales(m, tile)[g * lanes + r] = job->scales[(first + r) * job->ld_scales + g];
    }
}

void kda_unpack_item(const void *job_, ptrdiff_t tile, int thread) {
    const struct kda_pack_job *job = job_;
    const struct kda_matrix *m = &job->m;
    ptrdiff_t lanes = m->isa->lanes, first = tile * lanes;
    (void)thread;
    for (ptrdiff_t r = 0; r < lanes && first + r < m->N; r++) {
        uint8_t *codes = job->codes + (first + r) * job->ld_codes;
        const uint8_t *from = tile_codes(m, tile);
        if (m->bits == 8)
            for (ptrdiff_t i = 0; i < padded_k(m); i++) codes[i] = (uint8_t)taken_code(m, from, r, i);
        else
            for (ptrdiff_t i = 0; i < padded_k(m); i += 2)
                codes[i / 2] =
                    (uint8_t)((taken_code(m, from, r, i) + 8) | (taken_code(m, from, r, i + 1) + 8) << 4);
        for (ptrdiff_t g = 0; g < m->groups; g++)
            job->scales[(first + r) * job->ld_scales + g] = tile_scales(m, tile)[g * lanes + r];
    }
}

/* ---- quantising weights ---- */

ptrdiff_t kda_encode_scratch(const struct kda_matrix *m) { return padded_k(m) + 2 * m->groups + padded_k(m) / 4; }

static const float *as_row(const struct kda_matrix *m, const struct kda_tensor *x, ptrdiff_t row, float *to) {
    const char *from = (const char *)x->data + row * x->batch * (x->dtype == KDA_F32 ? 4 : 2);
    if (x->dtype == KDA_F32) {
        if (padded_k(m) == m->K) return (const float *)(const void *)from;
        memcpy(to, from, (size_t)m->K * sizeof *to);
    } else {
        (x->dtype == KDA_F16 ? m->isa->widen_f16 : m->isa->widen_bf16)(to, (const uint16_t *)(const void *)from,
                                                                       m->K);
    }
    memset(to + m->K, 0, (size_t)(padded_k(m) - m->K) * sizeof *to);
    return to;
}

/* The float16 scale of a group: amax / limit rounded, or the next one up where that one, a subnormal, rounded down
 * so far that amax would need a code past limit. 0x7c00 (infinity) where there is none. */
static uint16_t group_scale(const struct kda_kernels *isa, float amax, float limit) {
    float wanted = amax / limit, stored;
    uint16_t half;
    if (!(wanted <= 65504.0f)) return 0x7c00;
    isa->narrow_f16(&half, &wanted, 1);
    isa->widen_f16(&stored, &half, 1);
    if (amax > stored * (limit + 0.5f)) half++;
    return half;
}

void kda_encode_item(const void *job_, ptrdiff_t tile, int thread) {
    const struct kda_encode_job *job = job_;
    const struct kda_matrix *m = &job->m;
    const struct kda_kernels *isa = m->isa;
    ptrdiff_t lanes = isa->lanes, first = tile * lanes;
    int limit = m->bits == 8 ? 127 : 7;
    float *row = job->scratch + thread * job->scratch_floats, *scale = row + padded_k(m);
    int8_t *codes = (int8_t *)(scale + m->groups);
    blank_tile(m, tile);
    job->bad[tile] = -1;
    for (ptrdiff_t r = 0; r < lanes && first + r < m->N; r++) {
        const float *w = as_row(m, &job->w, first + r, row);
        for (ptrdiff_t g = 0; g < m->groups; g++) {
            uint16_t half = group_scale(isa, isa->amax(w + g * m->group, m->group), (float)limit);
            if (half == 0x7c00) {
                job->bad[tile] = (first + r) * m->groups + g;
                return;
            }
            isa->widen_f16(scale + g, &half, 1);
            tile_scales(m, tile)[g * lanes + r] = half;
            isa->encode(codes + g * m->group, w + g * m->group, scale[g], limit, m->group);
        }
        place_row(m, tile_codes(m, tile), codes, r);
    }
}

/* ---- multiplying ---- */

ptrdiff_t kda_idot_scratch(const struct kda_matrix *m) { return padded_k(m) + m->group; }

/* Full blocks first, then what is left as 4, 2 and 1. */
static ptrdiff_t block_at(const struct kda_idot_job *job, ptrdiff_t item, ptrdiff_t *start) {
    ptrdiff_t full = job->m.isa->idot_tokens, n = full;
    *start = item * full;
    if (*start + full <= job->T) return full;
    ptrdiff_t skip = item - job->T / full;
    *start = job->T / full * full;
    for (n = 4; n >= 1; n = *start + n <= job->T ? n : n / 2) {
        if (*start + n > job->T) continue;
        if (skip-- == 0) return n;
        *start += n;
    }
    return 0;
}

ptrdiff_t kda_idot_blocks(const struct kda_idot_job *job) {
    ptrdiff_t left = job->T % job->m.isa->idot_tokens;
    return job->T / job->m.isa->idot_tokens + left / 4 + left % 4 / 2 + left % 2;
}

ptrdiff_t kda_idot_chunks(const struct kda_idot_job *job) {
    return (kda_matrix_tiles(&job->m) + CHUNK - 1) / CHUNK;
}

/* The codes of token t and one group, in runs beside those of the other tokens. */
static void place_runs(int8_t *to, const int8_t *codes, ptrdiff_t group, ptrdiff_t t, ptrdiff_t tokens,
                       ptrdiff_t run) {
    if (run == 4) {
        for (ptrdiff_t i = 0; i < group; i += 4) memcpy(to + i * tokens + 4 * t, codes + i, 4);
        return;
    }
    for (ptrdiff_t i = 0; i < group; i += run) {
        ptrdiff_t n = group - i < run ? group - i : run;
        memcpy(to + i * tokens + n * t, codes + i, (size_t)n);
    }
}

void kda_idot_quantize_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_idot_job *job = job_;
    const struct kda_matrix *m = &job->m;
    float *row = job->scratch + thread * job->scratch_floats;
    int8_t *codes = (int8_t *)(row + padded_k(m));
    ptrdiff_t start, tokens = block_at(job, item, &start);
    ptrdiff_t run = tokens == m->isa->idot_tokens ? m->isa->idot_run : 4;
    int8_t *x_codes = job->x_codes + start * padded_k(m);
    float *x_scales = job->x_scales + start * m->groups;
    int32_t *x_sums = job->x_sums + start * m->groups;
    for (ptrdiff_t t = 0; t < tokens; t++) {
        const float *x = as_row(m, &job->x, start + t, row);
        for (ptrdiff_t g = 0; g < m->groups; g++) {
            x_sums[g * tokens + t] = m->isa->quantize(codes, x_scales + g * tokens + t, x + g * m->group, m->group);
            place_runs(x_codes + g * m->group * tokens, codes, m->group, t, tokens, run);
        }
    }
}

void kda_idot_item(const void *job_, ptrdiff_t item, int thread) {
    const struct kda_idot_job *job = job_;
    const struct kda_matrix *m = &job->m;
    ptrdiff_t lanes = m->isa->lanes, tiles = kda_matrix_tiles(m), blocks = kda_idot_blocks(job);
    kda_idot_fn *idot = m->bits == 8 ? m->isa->idot_q8 : m->isa->idot_q4;
    ptrdiff_t first = item * CHUNK, last = first + CHUNK < tiles ? first + CHUNK : tiles;
    (void)thread;
    for (ptrdiff_t b = 0; b < blocks; b++) {
        ptrdiff_t start, tokens = block_at(job, b, &start);
        for (ptrdiff_t tile = first; tile < last; tile++) {
            ptrdiff_t rows = m->N - tile * lanes < lanes ? m->N - tile * lanes : lanes;
            idot(job->y + start * job->ld_y + tile * lanes, tile_codes(m, tile), tile_scales(m, tile),
                 job->x_codes + start * padded_k(m), job->x_scales + start * m->groups,
                 job->x_sums + start * m->groups, tokens, rows, m->groups, m->group, job->ld_y);
        }
    }
}
