/* Tiles for a CPU that has none: the tile intrinsics that kda/_simd/tiles.inc uses, over arrays.
 *
 * A configuration or a product that the processor would refuse ends the program, and so does a configuration loaded
 * while one is in use: a kernel that left its tiles behind. As in avx512.h this shows that the logic is right, nothing
 * about speed. */
#ifndef KDA_EMULATE_AMX_H
#define KDA_EMULATE_AMX_H
#include "avx512.h"

#define __AMX_TILE__ 1 /* for the guard of isa_amx.c */
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1

static _Thread_local struct {
    int in_use;
    uint16_t row_bytes[8];
    uint8_t rows[8];
    uint8_t bytes[8][16][64];
} kda_tiles;

static inline void kda_demand(int condition) {
    if (!condition) __builtin_trap();
}

static inline void kda_tile_loadconfig(const void *config) {
    const uint8_t *c = config;
    kda_demand(!kda_tiles.in_use && c[0] == 1 && c[1] == 0);
    memset(&kda_tiles, 0, sizeof kda_tiles);
    memcpy(kda_tiles.row_bytes, c + 16, 16);
    memcpy(kda_tiles.rows, c + 48, 8);
    for (int i = 2; i < 64; i++)
        if (i < 16 || (i >= 32 && i < 48) || i >= 56) kda_demand(c[i] == 0);
    for (int t = 0; t < 8; t++)
        kda_demand(kda_tiles.row_bytes[t] <= 64 && kda_tiles.rows[t] <= 16 &&
                   !kda_tiles.row_bytes[t] == !kda_tiles.rows[t]);
    kda_tiles.in_use = 1;
}

static inline void kda_tile_release(void) { memset(&kda_tiles, 0, sizeof kda_tiles); }

static inline void kda_tile_zero(int t) {
    kda_demand(kda_tiles.in_use && kda_tiles.rows[t]);
    memset(kda_tiles.bytes[t], 0, sizeof kda_tiles.bytes[t]);
}

static inline void kda_tile_loadd(int t, const void *p, ptrdiff_t stride) {
    kda_tile_zero(t);
    for (int r = 0; r < kda_tiles.rows[t]; r++)
        memcpy(kda_tiles.bytes[t][r], (const char *)p + r * stride, kda_tiles.row_bytes[t]);
}

static inline void kda_tile_stored(int t, void *p, ptrdiff_t stride) {
    kda_demand(kda_tiles.in_use && kda_tiles.rows[t]);
    for (int r = 0; r < kda_tiles.rows[t]; r++)
        memcpy((char *)p + r * stride, kda_tiles.bytes[t][r], kda_tiles.row_bytes[t]);
}

/* Whether tile c can take the product of a and b. */
static inline void kda_demand_product(int c, int a, int b) {
    kda_demand(kda_tiles.in_use && c != a && c != b && a != b && kda_tiles.rows[a] && kda_tiles.rows[b] &&
               kda_tiles.rows[c] == kda_tiles.rows[a] && kda_tiles.row_bytes[c] == kda_tiles.row_bytes[b] &&
               kda_tiles.row_bytes[a] == 4 * kda_tiles.rows[b] && kda_tiles.row_bytes[c] % 4 == 0);
}

/* Signed bytes of a times unsigned ones of b. */
static inline void kda_tile_dpbsud(int c, int a, int b) {
    kda_demand_product(c, a, b);
    for (int m = 0; m < kda_tiles.rows[c]; m++)
        for (int n = 0; n < kda_tiles.row_bytes[c] / 4; n++) {
            int32_t sum;
            memcpy(&sum, kda_tiles.bytes[c][m] + 4 * n, 4);
            for (int k = 0; k < kda_tiles.row_bytes[a]; k++)
                sum += (int8_t)kda_tiles.bytes[a][m][k] * kda_tiles.bytes[b][k / 4][4 * n + k % 4];
            memcpy(kda_tiles.bytes[c][m] + 4 * n, &sum, 4);
        }
}

/* Even and odd products are summed apart, from zero, and added to the tile together; that the instruction also flushes
 * subnormals is left out. */
static inline void kda_tile_dpbf16ps(int c, int a, int b) {
    kda_demand_product(c, a, b);
    for (int m = 0; m < kda_tiles.rows[c]; m++)
        for (int n = 0; n < kda_tiles.row_bytes[c] / 4; n++) {
            float sums[2] = {0, 0}, old;
            for (int k = 0; k < kda_tiles.row_bytes[a] / 2; k++) {
                uint32_t x = 0, y = 0;
                float u, v;
                memcpy((char *)&x + 2, kda_tiles.bytes[a][m] + 2 * k, 2);
                memcpy((char *)&y + 2, kda_tiles.bytes[b][k / 2] + 4 * n + k % 2 * 2, 2);
                memcpy(&u, &x, 4);
                memcpy(&v, &y, 4);
                sums[k % 2] = fmaf(u, v, sums[k % 2]);
            }
            memcpy(&old, kda_tiles.bytes[c][m] + 4 * n, 4);
            old += sums[0] + sums[1];
            memcpy(kda_tiles.bytes[c][m] + 4 * n, &old, 4);
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(p) kda_tile_loadconfig(p)
#define _tile_release() kda_tile_release()
#define _tile_loadd(t, p, stride) kda_tile_loadd(t, p, stride)
#define _tile_stored(t, p, stride) kda_tile_stored(t, p, stride)
#define _tile_zero(t) kda_tile_zero(t)
#define _tile_dpbsud(c, a, b) kda_tile_dpbsud(c, a, b)
#define _tile_dpbf16ps(c, a, b) kda_tile_dpbf16ps(c, a, b)

#endif
