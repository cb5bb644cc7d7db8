/* CPU detection. A CPUID bit alone is not enough on x86: the registers must also be saved by the
 * operating system (XGETBV), or the first wide instruction is a fault. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* syscall */
#endif
#include "cpu.h"

#if defined(__x86_64__) || defined(_M_X64)

#if defined(_MSC_VER)
#include <intrin.h>
static void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t r[4]) {
    int v[4];
    __cpuidex(v, (int)leaf, (int)subleaf);
    for (int i = 0; i < 4; i++) r[i] = (uint32_t)v[i];
}
static uint32_t xcr0(void) { return (uint32_t)_xgetbv(0); }
#else
#include <cpuid.h>
static void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t r[4]) {
    __cpuid_count(leaf, subleaf, r[0], r[1], r[2], r[3]);
}
static uint32_t xcr0(void) {
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0)); /* the intrinsic would need -mxsave */
    return lo;
}
#endif

/* Linux lets a process use tiles once it has asked to: their 8 KiB make each thread's saved state, and the frames of
 * its signal handlers, larger. So nothing asks before they are used. */
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
enum { ARCH_GET_XCOMP_SUPP = 0x1021, ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
static int tiles_supported(void) {
    uint64_t supported = 0;
    return syscall(SYS_arch_prctl, ARCH_GET_XCOMP_SUPP, &supported) == 0 && supported >> XTILEDATA & 1;
}
int kda_permitted(uint32_t features) {
    return !(features & KDA_AMX) || syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
#else
static int tiles_supported(void) { return 0; }
int kda_permitted(uint32_t features) { return !(features & KDA_AMX); }
#endif

uint32_t kda_cpu_features(void) {
    enum { OSXSAVE = 1 << 27 };
    enum {
        YMM = 0x06,
        ZMM = 0xe6,
        TILES = 0x60000
    }; /* xcr0: sse|avx; + opmask|zmm_hi|hi16_zmm; tilecfg|tiledata */
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25 };
    uint32_t r[4], found = 0;
    cpuid(0, 0, r);
    if (r[0] < 7) return 0;
    cpuid(1, 0, r);
    uint32_t c1 = r[2];
    if (!(c1 & OSXSAVE)) return 0;
    uint32_t saved = xcr0();
    cpuid(7, 0, r);
    uint32_t b7 = r[1], c7 = r[2], d7 = r[3], a71 = 0;
    if (r[0] >= 1) {
        cpuid(7, 1, r);
        a71 = r[0];
    }
    if ((saved & YMM) == YMM) {
        if (c1 >> 12 & 1) found |= KDA_FMA;
        if (c1 >> 29 & 1) found |= KDA_F16C;
        if (b7 >> 5 & 1) found |= KDA_AVX2;
        if (a71 >> 4 & 1) found |= KDA_AVXVNNI;
    }
    if ((saved & ZMM) == ZMM) {
        if (b7 >> 16 & 1) found |= KDA_AVX512F;
        if (b7 >> 17 & 1) found |= KDA_AVX512DQ;
        if (b7 >> 30 & 1) found |= KDA_AVX512BW;
        if (b7 >> 31 & 1) found |= KDA_AVX512VL;
        if (c7 >> 11 & 1) found |= KDA_AVX512VNNI;
        if (a71 >> 5 & 1) found |= KDA_AVX512BF16;
    }
    uint32_t amx = AMX_BF16 | AMX_TILE | AMX_INT8;
    if ((saved & TILES) == TILES && (d7 & amx) == amx && tiles_supported()) found |= KDA_AMX;
    return found;
}

#elif defined(__aarch64__) || defined(_M_ARM64)

#if defined(__linux__)
#include <sys/auxv.h>
uint32_t kda_cpu_features(void) {
    enum { ASIMD = 1 << 1, ASIMDDP = 1 << 20, I8MM = 1 << 13 }; /* the kernel's bits: HWCAP, HWCAP, HWCAP2 */
    unsigned long cap = getauxval(AT_HWCAP), cap2 = getauxval(AT_HWCAP2);
    return (cap & ASIMD ? KDA_NEON : 0u) | (cap & ASIMDDP ? KDA_DOTPROD : 0u) | (cap2 & I8MM ? KDA_I8MM : 0u);
}
#elif defined(__APPLE__)
#include <sys/sysctl.h>
static int has(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, 0, 0) == 0 && value;
}
uint32_t kda_cpu_features(void) {
    return KDA_NEON | (has("hw.optional.arm.FEAT_DotProd") ? KDA_DOTPROD : 0u) |
           (has("hw.optional.arm.FEAT_I8MM") ? KDA_I8MM : 0u);
}
#else /* Windows on Arm requires Advanced SIMD */
uint32_t kda_cpu_features(void) { return KDA_NEON; }
#endif

#else

uint32_t kda_cpu_features(void) { return 0; }

#endif

#if !(defined(__x86_64__) || defined(_M_X64))
int kda_permitted(uint32_t features) {
    (void)features;
    return 1;
}
#endif
