/* dotprod: neon with sdot for IDOT.
 *
 *   sdot 4s         Cortex-A55/A75 and later, Neoverse, Apple: 16 multiply-adds s8 x s8, latency 4,
 *                   2 per cycle or more
 *
 * A full block of 8 tokens: 3 loads for 8 sdot, which take a token's quad from a lane, so nothing is broadcast; the
 * vector pipes bind (llvm-mca, N1: 9 cycles for 16 sdot, 8 for the sdot alone). One token: 2 loads per sdot, and
 * memory binds. Not timed.
 * Both factors are signed: the codes lie as they are. All else is isa_neon.c, compiled once more.
 */
#ifndef __ARM_FEATURE_DOTPROD
#error "isa_dotprod.c needs -march=armv8.2-a+dotprod"
#endif
#define ISA_NAME dotprod
#define HAVE_DOTPROD 1
#include "isa_neon.c"
