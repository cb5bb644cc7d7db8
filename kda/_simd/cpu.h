/* What the CPU offers and the operating system lets us use. */
#ifndef KDA_CPU_H
#define KDA_CPU_H
#include <stdint.h>

enum {
    KDA_AVX2 = 1 << 0,
    KDA_FMA = 1 << 1,
    KDA_F16C = 1 << 2,
    KDA_AVX512F = 1 << 3,
    KDA_AVX512BW = 1 << 4,
    KDA_AVX512VL = 1 << 5,
    KDA_AVX512DQ = 1 << 6,
    KDA_NEON = 1 << 7,
    KDA_AVX512BF16 = 1 << 8,
    KDA_AVX512VNNI = 1 << 9,
    KDA_AVXVNNI = 1 << 10,
    KDA_DOTPROD = 1 << 11,
    KDA_I8MM = 1 << 12,
    KDA_AMX = 1 << 13 /* tiles of bytes and of bfloat16 */
};

uint32_t kda_cpu_features(void);

/* Whether this process may use them: asks for what the operating system gives on request alone. */
int kda_permitted(uint32_t features);

#endif
