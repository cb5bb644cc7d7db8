/* The floating-point mode of the calling thread, for test_traces.py. */
#if defined(__x86_64__)
#include <xmmintrin.h>
unsigned long long get_mode(void) {
    unsigned short x87;
    __asm__ volatile("fnstcw %0" : "=m"(x87));
    return (_mm_getcsr() & ~0x3full) | (unsigned long long)x87 << 32; /* without the flags of what has happened */
}
void set_mode(unsigned long long mode) {
    unsigned short x87 = (unsigned short)(mode >> 32);
    _mm_setcsr((unsigned)mode);
    __asm__ volatile("fldcw %0" : : "m"(x87));
}
unsigned long long flushing(void) { return get_mode() | 0x8040; } /* FTZ and DAZ */
unsigned long long rounding_up(void) { return get_mode() | 2 << 13; }
#elif defined(__aarch64__)
unsigned long long get_mode(void) {
    unsigned long long mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
void set_mode(unsigned long long mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
unsigned long long flushing(void) { return get_mode() | 1 << 24; }
unsigned long long rounding_up(void) { return get_mode() | 1 << 22; }
#endif
