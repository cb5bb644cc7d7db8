/* The one place that knows about threads: a pool of workers that share the items of one call. */
#ifndef KDA_THREADS_H
#define KDA_THREADS_H
#include <stddef.h>

enum { KDA_MAX_THREADS = 1024 };

typedef void kda_task_fn(const void *job, ptrdiff_t item, int thread);

/* task(job, i, thread) once for each i in [first, first + items), on up to `threads` threads; thread is in
 * [0, threads). Returns when all are done. One job has the workers at a time: a call made meanwhile, by another
 * thread or from within a task, does all of its items itself. */
void kda_parallel_for(kda_task_fn *task, const void *job, ptrdiff_t first, ptrdiff_t items, int threads);

/* How many threads a large call uses, from 1 to KDA_MAX_THREADS; without threads 1, whatever is asked for. */
void kda_set_thread_limit(int n);
int kda_thread_limit(void);

/* What the workers are: "pthreads", "windows", or "serial" where there are none. */
const char *kda_threading(void);

#endif
