/* jobs.c, quant.c and dense.c over the pool of threads.c, for ThreadSanitizer: with several threads no item races
 * with another, and results are those of one thread, to the bit. For one ISA, whose flags ISA_FLAGS stand for:
 *
 *   cc -std=c11 -pthread -fsanitize=thread -Ikda/_simd -DISA=avx2 -mavx2 -mfma -mf16c tests/jobs_check.c \
 *      kda/_simd/isa_avx2.c kda/_simd/{threads,jobs,quant,dense}.c -lm -o check && ./check
 *
 * Prints "ok" and exits with 0, or says what went wrong and exits with 1. */
#include "dense.h"
#include "jobs.h"
#include "quant.h"
#include "threads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
extern const struct kda_kernels PASTE(kda_, ISA);
static const struct kda_kernels *const isa = &PASTE(kda_, ISA);

enum { T = 40, H = 2, HV = 4, K = 48, V = 36, TAPS = 4, SPACING = 16, THREADS = 4, ROUNDS = 6 };
enum {
    QK = T * H * K,
    VALUES = T * HV * V,
    DECAYS = T * HV * K,
    STATE = HV * K * V,
    HISTORY = (TAPS - 1) * (2 * H * K + HV * V)
};
enum { N = 150, COLUMNS = 96, GROUP = 32, GROUPS = COLUMNS / GROUP };

static float noise(void) {
    static unsigned seed = 1;
    seed = seed * 1664525 + 1013904223;
    return (float)(seed >> 8) / 8388608.0f - 1.0f;
}

static float *filled(ptrdiff_t n) {
    float *x = malloc((size_t)n * sizeof *x);
    if (!x) exit(1);
    for (ptrdiff_t i = 0; i < n; i++) x[i] = noise();
    return x;
}

/* What calls write, filled anew before each. */
static struct output {
    void *data, *first; /* and what the first call, on one thread, made of it */
    size_t bytes;
} outputs[24];
static int output_count;

static void *output(size_t bytes) {
    struct output *o = &outputs[output_count++];
    o->data = malloc(bytes), o->first = malloc(bytes), o->bytes = bytes;
    if (!o->data || !o->first) exit(1);
    return o->data;
}

static struct kda_tensor tensor(void *data, ptrdiff_t token, ptrdiff_t head) {
    return (struct kda_tensor){.data = data, .batch = 0, .token = token, .head = head, .dtype = KDA_F32};
}

static float *scratch; /* enough for every job and thread */
static float *q, *k, *v, *g, *beta, *initial, *x, *taps, *gate, *weight, *d_o, *w, *rows;
static float *o_steps, *o_blocks, *s_steps, *s_blocks, *s_layer, *states, *o_layer, *history, *y_conv, *past,
    *y_norm;
static float *grads[7], *y_idot, *y_dense, *panels;
static unsigned char *codes;
static unsigned short *scales;
static int64_t bad[N];

/* The delta rule over q, k, v, g and beta, into o. */
static struct kda_job recurrence(float *o, ptrdiff_t block, ptrdiff_t group, ptrdiff_t splits) {
    struct kda_job job = {.isa = isa,
                          .N = 1,
                          .T = T,
                          .H = H,
                          .HV = HV,
                          .K = K,
                          .V = V,
                          .block = block,
                          .group = group,
                          .splits = splits,
                          .scale = 0.2f,
                          .eps = 1e-6f,
                          .scratch = scratch,
                          .spacing = SPACING};
    job.q = tensor(q, H * K, K), job.k = tensor(k, H * K, K), job.v = tensor(v, HV * V, V);
    job.g = tensor(g, HV * K, K), job.beta = tensor(beta, HV, 1), job.o = tensor(o, HV * V, V);
    return job;
}

static void delta(int threads, ptrdiff_t block, ptrdiff_t splits, float *o, float *s) {
    struct kda_job job = recurrence(o, block, 1, splits);
    job.s_out = tensor(s, 0, K * V), job.s_in = tensor(initial, 0, K * V);
    if (block > 1) job.states = tensor(states, STATE, K * V);
    job.scratch_floats = kda_delta_scratch(&job);
    for (job.from = 0, job.to = 16; job.from < T; job.from = job.to, job.to += 16, job.s_in = job.s_out)
        kda_parallel_for(kda_delta_item, &job, 0, kda_delta_items(&job), threads);
    if (block == 1) return;
    struct kda_backward_job back = {.forward = job, .from = 0, .to = (T - 1) / SPACING + 1};
    back.forward.from = back.forward.to = 0, back.forward.s_in = tensor(initial, 0, K * V);
    back.d_o = back.forward.o = tensor(d_o, HV * V, V), back.ds_out = tensor(grads[6], 0, K * V);
    back.dq = tensor(grads[0], HV * K, K), back.dk = tensor(grads[1], HV * K, K),
    back.dg = tensor(grads[2], HV * K, K);
    back.dv = tensor(grads[3], HV * V, V), back.dbeta = tensor(grads[4], HV, 1), back.da = tensor(grads[5], HV, 1);
    back.forward.splits = 1, back.forward.scratch_floats = kda_backward_scratch(&back.forward);
    kda_parallel_for(kda_backward_item, &back, 0, HV, threads);
}

/* Short convolutions, gate and norm around the recurrence, two heads in turn, in place. */
static void layer(int threads) {
    const int64_t cu[] = {0, T};
    void *s = s_layer;
    float *h = history, *none = NULL;
    struct kda_job job = recurrence(o_layer, KDA_BLOCK, 2, 1);
    job.cu_seqlens = cu, job.conv_width = TAPS;
    job.norm_weight = weight, job.norm_eps = 1e-5f, job.norm_activation = KDA_SIGMOID;
    job.o_gate = tensor(gate, HV * V, V);
    job.rows = (struct kda_rows){&s, &s, &h, &h, &none, &none};
    job.conv_q = (struct kda_short_conv){.taps = taps, .D = H * K};
    job.conv_k = (struct kda_short_conv){.taps = taps, .D = H * K, .start = (TAPS - 1) * H * K};
    job.conv_v = (struct kda_short_conv){.taps = taps, .D = HV * V, .start = 2 * (TAPS - 1) * H * K};
    job.scratch_floats = kda_delta_scratch(&job);
    memcpy(s_layer, initial, STATE * sizeof *initial);
    memcpy(history, x, HISTORY * sizeof *x);
    kda_parallel_for(kda_delta_item, &job, 0, kda_delta_items(&job), threads);
    if (kda_history_is_shared(&job)) kda_keep_shared_histories(&job);
}

static void epilogues(int threads) {
    struct kda_conv_job conv = {.isa = isa,
                                .taps = taps,
                                .state_out = past,
                                .out_channel = TAPS - 1,
                                .out_tap = 1,
                                .N = 1,
                                .T = T,
                                .D = HV * K,
                                .width = TAPS,
                                .activation = KDA_SILU,
                                .scratch = scratch};
    conv.x = tensor(g, HV * K, 0), conv.y = tensor(y_conv, HV * K, 0);
    conv.scratch_floats = kda_conv_scratch(&conv);
    kda_parallel_for(kda_conv_item, &conv, 0, kda_conv_items(&conv), threads);
    struct kda_norm_job norm = {.isa = isa,
                                .weight = weight,
                                .T = T,
                                .H = HV,
                                .n = V,
                                .eps = 1e-5f,
                                .activation = KDA_SILU,
                                .scratch = scratch,
                                .scratch_floats = 3 * V};
    norm.x = tensor(v, HV * V, V), norm.gate = tensor(gate, HV * V, V), norm.y = tensor(y_norm, HV * V, V);
    kda_parallel_for(kda_norm_item, &norm, 0, T, threads);
}

static void matrices(int threads) {
    struct kda_matrix m = {isa, codes, scales, N, COLUMNS, GROUPS, GROUP, 4};
    struct kda_encode_job encode = {
        .m = m, .bad = bad, .scratch = scratch, .scratch_floats = kda_encode_scratch(&m)};
    encode.w = tensor(w, 0, 0), encode.w.batch = COLUMNS;
    kda_parallel_for(kda_encode_item, &encode, 0, kda_matrix_tiles(&m), threads);
    ptrdiff_t own = kda_idot_scratch(&m) + 16;
    struct kda_idot_job idot = {.m = m, .y = y_idot, .T = T, .ld_y = N, .scratch = scratch, .scratch_floats = own};
    idot.x = encode.w, idot.x.data = rows;
    idot.x_scales = scratch + THREADS * own, idot.x_sums = (int32_t *)(idot.x_scales + T * GROUPS);
    idot.x_codes = (int8_t *)(idot.x_sums + T * GROUPS);
    kda_parallel_for(kda_idot_quantize_item, &idot, 0, kda_idot_blocks(&idot), threads);
    kda_parallel_for(kda_idot_item, &idot, 0, kda_idot_chunks(&idot), threads);
    struct kda_dense_job dense = {.isa = isa,
                                  .panels = panels,
                                  .N = N,
                                  .K = COLUMNS,
                                  .w = encode.w,
                                  .rows = N,
                                  .x = rows,
                                  .y = y_dense,
                                  .T = T,
                                  .ld_x = COLUMNS,
                                  .ld_y = N,
                                  .scratch = scratch,
                                  .scratch_floats = COLUMNS};
    kda_parallel_for(kda_dense_pack_item, &dense, 0, kda_dense_panels(&dense), threads);
    kda_parallel_for(kda_dense_item, &dense, 0, kda_dense_chunks(&dense), threads);
}

int main(void) {
    scratch = malloc(64 << 20);
    q = filled(QK), k = filled(QK), v = filled(VALUES), g = filled(DECAYS), beta = filled(T * HV);
    initial = filled(STATE), x = filled(HISTORY), taps = filled(TAPS * HV * K), gate = filled(VALUES);
    weight = filled(V), d_o = filled(VALUES), w = filled(N * COLUMNS), rows = filled(T * COLUMNS);
    for (int i = 0; i < DECAYS; i++) g[i] = g[i] < 0 ? g[i] : -g[i];
    o_steps = output(VALUES * 4), o_blocks = output(VALUES * 4), o_layer = output(VALUES * 4);
    s_steps = output(STATE * 4), s_blocks = output(STATE * 4), s_layer = output(STATE * 4);
    states = output(T / SPACING * STATE * 4), history = output(HISTORY * 4);
    y_conv = output(DECAYS * 4), past = output((TAPS - 1) * HV * K * 4), y_norm = output(VALUES * 4);
    const size_t sizes[] = {DECAYS, DECAYS, DECAYS, VALUES, T * HV, T * HV, STATE};
    for (int i = 0; i < 7; i++) grads[i] = output(sizes[i] * 4);
    struct kda_matrix m = {isa, NULL, NULL, N, COLUMNS, GROUPS, GROUP, 4};
    struct kda_dense_job d = {.isa = isa, .N = N, .K = COLUMNS};
    codes = output((size_t)(kda_matrix_tiles(&m) * kda_matrix_tile_bytes(&m)));
    scales = output((size_t)(kda_matrix_tiles(&m) * GROUPS * isa->lanes) * 2);
    y_idot = output(T * N * 4), y_dense = output(T * N * 4);
    panels = output((size_t)(kda_dense_panels(&d) * isa->dense_lanes * COLUMNS) * 4);
    for (int round = 0; round < ROUNDS; round++) {
        int threads = round ? THREADS : 1;
        for (int i = 0; i < output_count; i++) memset(outputs[i].data, 255, outputs[i].bytes);
        delta(threads, 1, 3, o_steps, s_steps);
        delta(threads, KDA_BLOCK, 1, o_blocks, s_blocks);
        layer(threads);
        epilogues(threads);
        matrices(threads);
        for (int i = 0; i < output_count; i++) {
            if (round == 0) memcpy(outputs[i].first, outputs[i].data, outputs[i].bytes);
            if (memcmp(outputs[i].first, outputs[i].data, outputs[i].bytes)) {
                printf("failed: output %d differs on %d threads\n", i, threads);
                return 1;
            }
        }
    }
    for (int i = 0; i < VALUES; i++)
        if (!(o_steps[i] - o_blocks[i] < 1e-4f && o_blocks[i] - o_steps[i] < 1e-4f)) {
            puts("failed: blocks are not steps");
            return 1;
        }
    puts("ok");
    return 0;
}
