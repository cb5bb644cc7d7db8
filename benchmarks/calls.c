/* Calls one kernel of one ISA a given number of times: what counts.py counts the instructions of.
 *
 *   calls KERNEL TIMES
 *
 * Built for an ISA with -DISA=kda_avx2 and its object file. Inputs are ordinary numbers; results are not looked at. */
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

extern const struct kda_kernels ISA;
enum { K = 128, V = 128, CHANNELS = 256, GROUP = 128, GROUPS = 8, TOKENS = KDA_BLOCK };

static float *floats(ptrdiff_t n) {
    float *x = aligned_alloc(64, (size_t)(n + 16) / 16 * 64);
    return memset(x, 0x3c, (size_t)n * sizeof *x); /* 0.0115 each, at next to no instructions */
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    const struct kda_kernels *isa = &ISA;
    const char *name = arguments[1];
    float *s = floats(K * V), *q = floats(TOKENS * K), *k = floats(TOKENS * K), *v = floats(TOKENS * V);
    float *decay = floats(TOKENS * K), *beta = floats(TOKENS), *o = floats(TOKENS * V);
    float *work = floats(KDA_BLOCK_WORK(K)), *x = floats((TOKENS + 3) * CHANNELS), *y = floats(TOKENS * CHANNELS);
    float *pending = floats(KDA_PENDING(K, V));
    uint8_t *codes = calloc(64, (size_t)(GROUPS * GROUP));
    uint16_t *scales = calloc(64, GROUPS);
    int8_t *x_codes = calloc(64, (size_t)(GROUPS * GROUP));
    int32_t *x_sums = calloc(64, GROUPS * sizeof *x_sums);
    const float *rows[TOKENS + 3];
    float *y_rows[TOKENS];
    for (int t = 0; t < TOKENS + 3; t++) rows[t] = x + t * CHANNELS;
    for (int t = 0; t < TOKENS; t++) y_rows[t] = y + t * CHANNELS;

    for (int n = atoi(arguments[2]); n > 0; n--) {
        if (!strcmp(name, "step"))
            isa->step(o, s, NULL, work, s, NULL, q, k, v, decay, 0.5f, K, V, V, V);
        else if (!strcmp(name, "step_pending"))
            isa->step(o, s, pending, work, s, pending, q, k, v, decay, 0.5f, K, V, V, V);
        else if (!strcmp(name, "block"))
            isa->block(o, s, work, q, k, v, decay, beta, TOKENS, K, V, V, V, V);
        else if (!strcmp(name, "conv"))
            isa->conv(y_rows, rows, x, NULL, TOKENS, CHANNELS, CHANNELS, 4, KDA_SILU);
        else if (!strcmp(name, "conv_step"))
            isa->conv_step(y, work, x, s, NULL, CHANNELS, 4, KDA_SILU);
        else if (!strcmp(name, "norm_gated"))
            isa->norm_gated(y, x, s, decay, 1e-5f, CHANNELS, KDA_SIGMOID);
        else if (!strcmp(name, "exp"))
            isa->exp(y, x, CHANNELS);
        else if (!strcmp(name, "dense"))
            isa->dense(y, s, x, TOKENS, isa->dense_lanes, K, K, CHANNELS);
        else if (!strcmp(name, "idot_q8_1") || !strcmp(name, "idot_q4_1"))
            (name[6] == '8' ? isa->idot_q8 : isa->idot_q4)(y, codes, scales, x_codes, x, x_sums, 1, isa->lanes,
                                                           GROUPS, GROUP, CHANNELS);
        else if (!strcmp(name, "idot_q8") || !strcmp(name, "idot_q4"))
            (name[6] == '8' ? isa->idot_q8 : isa->idot_q4)(y, codes, scales, x_codes, x, x_sums, isa->idot_tokens,
                                                           isa->lanes, GROUPS, GROUP, CHANNELS);
        else
            return 2;
    }
    return 0;
}
