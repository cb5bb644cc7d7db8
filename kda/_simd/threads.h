/* The one place that knows about threads. */
#ifndef KDA_THREADS_H
#define KDA_THREADS_H
#include <stddef.h>

typedef void kda_task_fn(const void *job, ptrdiff_t item, int thread);

/* task(job, i, thread) for i in [0, items), on up to `threads` threads; thread is in [0, threads).
 * uneven: items differ in size, so hand them out one by one instead of in equal runs. */
void kda_parallel_for(kda_task_fn *task, const void *job, ptrdiff_t items, int threads, int uneven);

/* "openmp" or "serial". */
const char *kda_threading(void);

/* How many threads OpenMP would use for a region that this thread starts now: OMP_NUM_THREADS,
 * threadpoolctl and omp_set_num_threads all speak through this. 1 without OpenMP. */
int kda_openmp_limit(void);
void kda_raise_openmp_limit(int threads);

#endif
