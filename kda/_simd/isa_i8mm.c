/* i8mm: neon with sdot for few tokens and smmla for full blocks of IDOT.
 *
 *   smmla 4s        Cortex-A510/A710, Neoverse V1/N2, Apple M2 and later: a 2 x 8 by 8 x 2 product, 32
 * multiply-adds, latency 3-4, 2 per cycle
 *
 * All else is isa_neon.c, compiled once more.
 */
#ifndef __ARM_FEATURE_MATMUL_INT8
#error "isa_i8mm.c needs -march=armv8.2-a+dotprod+i8mm"
#endif
#define ISA_NAME i8mm
#define HAVE_DOTPROD 1
#define HAVE_I8MM 1
#include "isa_neon.c"
