/* A malloc that fails when it is told to, for test_memory.py: LD_PRELOAD it, then call fail_from and fail_never.
 *
 *   cc -shared -fPIC -o failing.so failing_malloc.c */
#include <errno.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

static __thread long left = -1; /* allocations of this thread until one fails; < 0: none does */
static __thread int all;        /* and whether all that follow fail too */

enum { LEAST = 1024 }; /* bytes: some smaller ones are numpy's own, which loses their errors */

void fail_from(long n, int all_that_follow) { left = n, all = all_that_follow; }

/* How many were left when it ended: -1 if one failed. */
long fail_never(void) {
    long were = left;
    left = -1;
    return were;
}

static int fails(size_t n) {
    if (n < LEAST || left < 0 || left-- > 0) return 0;
    if (all) left = 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t n) { return fails(n) ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return fails(n * size) ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return fails(n) ? NULL : __libc_realloc(p, n); }
