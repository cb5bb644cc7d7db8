/* The table of isa_table.h as pointers, and which of its rows run on this CPU. */
#include "cpu.h"
#include "kernels.h"

/* setup.py defines KDA_MACHINE_<machine>: the same word that made it choose the files to compile. */
#ifdef KDA_MACHINE_X86_64
#define IF_X86_64(row) row
#else
#define IF_X86_64(row)
#endif
#ifdef KDA_MACHINE_AARCH64
#define IF_AARCH64(row) row
#else
#define IF_AARCH64(row)
#endif
#define IF_ANY(row) row

#define ISA(name, machine, needs, gnu, msvc) IF_##machine(extern const struct kda_kernels kda_##name;)
#include "isa_table.h"
#undef ISA

#define ISA(name, machine, needs, gnu, msvc) IF_##machine({&kda_##name COMMA(needs) COMMA 0} COMMA)
#define COMMA ,
struct kda_isa kda_isas[KDA_MAX_ISAS] = {
#include "isa_table.h"
};
#undef ISA

int kda_isa_count;

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
const char *kda_compiler(void) {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#elif defined(_MSC_VER)
    return "msvc " TEXT(_MSC_FULL_VER);
#else
    return "unknown";
#endif
}

#ifndef KDA_FLAGS /* setup.py defines it: a string */
#define KDA_FLAGS ""
#endif
const char *kda_flags(void) { return KDA_FLAGS; }

void kda_dispatch_init(void) {
    uint32_t here = kda_cpu_features();
    kda_isa_count = 0;
    while (kda_isa_count < KDA_MAX_ISAS && kda_isas[kda_isa_count].kernels) {
        struct kda_isa *isa = &kda_isas[kda_isa_count++];
        isa->runs_here = (here & isa->needs) == isa->needs;
    }
}
