/* amx: avx512bf16 with tiles for full blocks of IDOT and for the products with S in block_bf16.
 *
 *   instruction            Sapphire Rapids and later
 *   tileloadd, tilestored  16 rows of 64 bytes: 8 cycles, 16 cycles
 *   tdpbsud                16 x 64 by 64 x 16 bytes, 16384 multiply-adds s8 x u8: 16 cycles, latency 52
 *   tdpbf16ps              16 x 32 by 32 x 16 bfloat16, 8192 multiply-adds: the same
 *
 * All else is isa_avx512.c, compiled once more: its float32 results have the same bits. tiles.inc says what binds.
 *
 * Not timed, and run only with the tile instructions emulated (tools/emulate/amx.h). So the table has it below the
 * rows that it would beat: it runs where KDA_ISA=amx or isa="amx" asks for it.
 */
#if !(defined(__AMX_INT8__) || defined(__AMXINT8__)) || \
    !(defined(__AMX_BF16__) || defined(__AMXBF16__)) /* gcc; clang 14 */
#error "isa_amx.c needs -mamx-tile -mamx-int8 -mamx-bf16"
#endif
#define ISA_NAME amx
#define HAVE_VNNI 1
#ifndef HAVE_PAIRS /* the emulation comes with these defined */
#define HAVE_PAIRS 1
#define HAVE_TILES 1
#endif
#include "isa_avx512.c"
