/* avx512vnni: avx512 with vpdpbusd for IDOT.
 *
 *   vpdpbusd zmm    Cascade Lake, Ice Lake .. Sapphire Rapids, Zen 4: 64 multiply-adds u8 x s8, latency 4 to 5,
 *                   1 or 2 per cycle
 *
 * It wants one factor unsigned, so the weights lie with 128 added and 128 times the sum of the activation's codes
 * is taken off again: exact, and paid once per group. A full block of 12 tokens loads a vector of weights and 12
 * quads for 12 dots: 1.1 loads per dot, nothing spilled, so two loads a cycle bind nearly as much as two dots a
 * cycle (llvm-mca, Ice Lake: 34 cycles for 48 dots, 24 for the dots alone). One token: 2 loads per dot, and memory
 * binds. Not timed. All else is isa_avx512.c, compiled once more: its float32 results have the same bits.
 */
#if !defined(__AVX512VNNI__) && !defined(_MSC_VER) /* which has the intrinsics without a word for it */
#error "isa_avx512vnni.c needs -mavx512vnni"
#endif
#define ISA_NAME avx512vnni
#define HAVE_VNNI 1
#include "isa_avx512.c"
