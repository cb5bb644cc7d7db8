/* In place of kda/_simd/cpu.c: what the hardware offers, and what is emulated. */
#define _GNU_SOURCE /* for the one below */
#include "cpu.h"

#define kda_cpu_features kda_cpu_features_of_hardware
#define kda_permitted kda_permitted_by_hardware
#include "../../kda/_simd/cpu.c"
#undef kda_cpu_features
#undef kda_permitted

uint32_t kda_cpu_features(void) {
    return kda_cpu_features_of_hardware() | KDA_AVX512F | KDA_AVX512BW | KDA_AVX512VL | KDA_AVX512DQ |
           KDA_AVX512VNNI | KDA_AVX512BF16 | KDA_AMX;
}

int kda_permitted(uint32_t features) { return kda_permitted_by_hardware(features & ~(uint32_t)KDA_AMX); }
