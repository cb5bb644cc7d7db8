/* avx512bf16: avx512vnni with vdpbf16ps for the products with S in block_bf16.
 *
 *   vdpbf16ps zmm       Cooper Lake, Sapphire Rapids, Zen 4: 32 multiply-adds, 1 per cycle where vfmadd has 1 or 2
 *   vcvtne2ps2bf16 zmm  32 floats to bfloat16, with vpermw to interleave two rows: once per panel of S and block
 *
 * The tile of block_bf16: 0.63 loads per vdpbf16ps, nothing else; the multiply pipe binds. Not timed.
 * All else is isa_avx512.c, compiled once more: its float32 results have the same bits.
 */
#if !defined(__AVX512BF16__) && !defined(_MSC_VER) /* which has the intrinsics without a word for it */
#error "isa_avx512bf16.c needs -mavx512bf16"
#endif
#define ISA_NAME avx512bf16
#define HAVE_VNNI 1
#ifndef HAVE_PAIRS /* the emulation comes with it defined */
#if defined(_MSC_VER) && !defined(__clang__)
#define HAVE_PAIRS 0 /* MSVC has no casts between vectors: block_bf16 as in isa_avx512.c */
#else
#define HAVE_PAIRS 1
#endif
#endif
#include "isa_avx512.c"
