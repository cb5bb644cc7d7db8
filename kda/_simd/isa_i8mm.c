/* i8mm: dotprod with smmla for full blocks of IDOT.
 *
 *   smmla 4s        Cortex-A510/A710, Neoverse V1/N2, Apple M2 and later: 2 x 8 by 8 x 2, 32 multiply-adds
 *
 * Per eight columns of four rows, a full block of 8 tokens takes 6 loads and 2 zips for 8 smmla, where sdot by
 * lanes takes 6 loads for 16; q4 one load less and 3 operations more for the nibbles. By llvm-mca 5 cycles where the
 * smmla alone take 4 (N2). Not timed.
 * All else is isa_neon.c, compiled once more.
 */
#ifndef __ARM_FEATURE_MATMUL_INT8
#error "isa_i8mm.c needs -march=armv8.2-a+dotprod+i8mm"
#endif
#define ISA_NAME i8mm
#define HAVE_DOTPROD 1
#define HAVE_I8MM 1
#include "isa_neon.c"
