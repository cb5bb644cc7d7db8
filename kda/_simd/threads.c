#include "threads.h"

#ifdef _OPENMP
#include <omp.h>

void kda_parallel_for(kda_task_fn *task, const void *job, ptrdiff_t items, int threads, int uneven) {
    if (threads <= 1 || items <= 1) { /* no region: a forked child must not meet the parent's team */
        for (ptrdiff_t i = 0; i < items; i++) task(job, i, 0);
    } else if (uneven) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (ptrdiff_t i = 0; i < items; i++) task(job, i, omp_get_thread_num());
    } else {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (ptrdiff_t i = 0; i < items; i++) task(job, i, omp_get_thread_num());
    }
}

const char *kda_threading(void) { return "openmp"; }
int kda_openmp_limit(void) { return omp_in_parallel() ? 1 : omp_get_max_threads(); }
void kda_raise_openmp_limit(int threads) {
    if (omp_get_max_threads() < threads) omp_set_num_threads(threads);
}

#else

void kda_parallel_for(kda_task_fn *task, const void *job, ptrdiff_t items, int threads, int uneven) {
    (void)threads, (void)uneven;
    for (ptrdiff_t i = 0; i < items; i++) task(job, i, 0);
}

const char *kda_threading(void) { return "serial"; }
int kda_openmp_limit(void) { return 1; }
void kda_raise_openmp_limit(int threads) { (void)threads; }

#endif
