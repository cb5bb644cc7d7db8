/* avxvnni: avx2 with the VEX form of vpdpbusd for IDOT.
 *
 *   vpdpbusd ymm    Alder Lake and later, Zen 5: 32 multiply-adds u8 x s8, latency 5, 2 per cycle
 *
 * Weights lie with 128 added, as for avx512vnni. All else is isa_avx2.c, compiled once more.
 */
#if !defined(__AVXVNNI__) && !defined(_MSC_VER) /* which has the intrinsics without a word for it */
#error "isa_avxvnni.c needs -mavxvnni"
#endif
#define ISA_NAME avxvnni
#define HAVE_VNNI 1
#include "isa_avx2.c"
