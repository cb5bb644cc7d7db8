/* One row per ISA, best first, but for amx, which nobody has run yet: it stands below rows whose needs are fewer, so
 * that it is never the one chosen at import. dispatch.c registers the rows of the machine it is compiled for,
 * setup.py compiles isa_<name>.c of the same rows with the flags written here, and tests and
 * benchmarks meet them through kda.isas(). scalar stays last and needs nothing.
 *
 *  name, machine, CPU needs, GCC/Clang flags, MSVC flags (untested) */
ISA(avx512bf16, X86_64,
    KDA_AVX512F | KDA_AVX512BW | KDA_AVX512VL | KDA_AVX512DQ | KDA_AVX512VNNI | KDA_AVX512BF16 | KDA_AVX2 |
        KDA_FMA | KDA_F16C,
    "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mavx2 -mfma -mf16c", "/arch:AVX512")
ISA(avx512vnni, X86_64,
    KDA_AVX512F | KDA_AVX512BW | KDA_AVX512VL | KDA_AVX512DQ | KDA_AVX512VNNI | KDA_AVX2 | KDA_FMA | KDA_F16C,
    "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c", "/arch:AVX512")
ISA(avx512, X86_64, KDA_AVX512F | KDA_AVX512BW | KDA_AVX512VL | KDA_AVX512DQ | KDA_AVX2 | KDA_FMA | KDA_F16C,
    "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c", "/arch:AVX512")
ISA(amx, X86_64,
    KDA_AMX | KDA_AVX512F | KDA_AVX512BW | KDA_AVX512VL | KDA_AVX512DQ | KDA_AVX512VNNI | KDA_AVX512BF16 |
        KDA_AVX2 | KDA_FMA | KDA_F16C,
    "-mamx-tile -mamx-int8 -mamx-bf16 -mavx512bf16 -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c", "/arch:AVX512")
ISA(avxvnni, X86_64, KDA_AVXVNNI | KDA_AVX2 | KDA_FMA | KDA_F16C, "-mavxvnni -mavx2 -mfma -mf16c", "/arch:AVX2")
ISA(avx2, X86_64, KDA_AVX2 | KDA_FMA | KDA_F16C, "-mavx2 -mfma -mf16c", "/arch:AVX2")
ISA(i8mm, AARCH64, KDA_NEON | KDA_DOTPROD | KDA_I8MM, "-march=armv8.2-a+dotprod+i8mm", "")
ISA(dotprod, AARCH64, KDA_NEON | KDA_DOTPROD, "-march=armv8.2-a+dotprod", "")
ISA(neon, AARCH64, KDA_NEON, "", "")
ISA(scalar, ANY, 0, "-fno-tree-vectorize", "")
