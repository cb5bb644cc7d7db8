/* Workers are started when a call first needs them, and never end. Each has a slot: the caller posts a job into it,
 * the worker takes the job and, when done, leaves the slot idle again. A worker waits for its next job spinning for
 * SPIN_NS, long enough to bridge the gap from one call to the next, and then asleep.
 *
 * Each thread begins with an equal run of the items, the same ones from call to call, so that a core meets the data
 * that its caches hold; then it takes from the runs of others. So nobody waits for a worker that the system has not
 * woken, or has put aside for another program: its items are done by the others, and its job is taken back. */
#if !defined(_WIN32) && !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* clock_gettime, pthread_sigmask */
#endif
#include "threads.h"

#if defined(KDA_SERIAL) || defined(__STDC_NO_ATOMICS__)

void kda_parallel_for(kda_task_fn *task, const void *job, ptrdiff_t first, ptrdiff_t items, int threads) {
    (void)threads;
    for (ptrdiff_t i = 0; i < items; i++) task(job, first + i, 0);
}

void kda_set_thread_limit(int n) { (void)n; }
int kda_thread_limit(void) { return 1; }
const char *kda_threading(void) { return "serial"; }

#else

#include <stdatomic.h>
#include <stdint.h>

enum { SPIN_NS = 20000, PAUSES = 16, CACHE_LINE = 64 };

/* ---- what the system offers ---- */

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

typedef SRWLOCK lock_t;
typedef CONDITION_VARIABLE cond_t;
static void lock_init(lock_t *lock) { InitializeSRWLock(lock); }
static void lock(lock_t *lock) { AcquireSRWLockExclusive(lock); }
static void unlock(lock_t *lock) { ReleaseSRWLockExclusive(lock); }
static void cond_init(cond_t *cond) { InitializeConditionVariable(cond); }
static void cond_wait(cond_t *cond, lock_t *lock) { SleepConditionVariableSRW(cond, lock, INFINITE, 0); }
static void cond_signal(cond_t *cond) { WakeConditionVariable(cond); }

static int64_t now_ns(void) {
    LARGE_INTEGER count, rate;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&rate);
    return (int64_t)((double)count.QuadPart * 1e9 / (double)rate.QuadPart);
}

static void worker(int thread);
static DWORD WINAPI start(LPVOID thread) {
    worker((int)(intptr_t)thread);
    return 0;
}
static int start_worker(int thread) {
    HANDLE handle = CreateThread(NULL, 0, start, (LPVOID)(intptr_t)thread, 0, NULL);
    return handle && CloseHandle(handle);
}
static void expect_forks(void) {}

const char *kda_threading(void) { return "windows"; }

#else
#include <pthread.h>
#include <signal.h>
#include <time.h>

typedef pthread_mutex_t lock_t;
typedef pthread_cond_t cond_t;
static void lock_init(lock_t *lock) { pthread_mutex_init(lock, NULL); }
static void lock(lock_t *lock) { pthread_mutex_lock(lock); }
static void unlock(lock_t *lock) { pthread_mutex_unlock(lock); }
static void cond_init(cond_t *cond) { pthread_cond_init(cond, NULL); }
static void cond_wait(cond_t *cond, lock_t *lock) { pthread_cond_wait(cond, lock); }
static void cond_signal(cond_t *cond) { pthread_cond_signal(cond); }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void worker(int thread);
static void *start(void *thread) {
    worker((int)(intptr_t)thread);
    return NULL;
}

/* Signals go to the program's own threads, but for those that a fault of the worker itself raises. */
static int start_worker(int thread) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigset_t blocked, before;
    pthread_t id;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int started = pthread_create(&id, NULL, start, (void *)(intptr_t)thread) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started) pthread_detach(id);
    return started;
}

static void forget_workers(void);
static void expect_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

const char *kda_threading(void) { return "pthreads"; }

#endif

#if defined(__x86_64__) || defined(__i386__)
static void pause_cpu(void) { __builtin_ia32_pause(); }
#elif defined(__aarch64__)
static void pause_cpu(void) { __asm__ volatile("isb"); }
#elif defined(_WIN32)
static void pause_cpu(void) { YieldProcessor(); }
#else
static void pause_cpu(void) {}
#endif

/* The mode that a thread computes in: how it rounds, and whether it flushes subnormals. A worker takes that of its
 * caller, or a result would depend on who computed it; and not the flags of what has happened. */
#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
typedef unsigned float_mode_t;
static float_mode_t float_mode(void) { return _mm_getcsr() & ~0x3fu; }
static void set_float_mode(float_mode_t mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
typedef uint64_t float_mode_t;
static float_mode_t float_mode(void) {
    float_mode_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void set_float_mode(float_mode_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
typedef int float_mode_t;
static float_mode_t float_mode(void) { return 0; }
static void set_float_mode(float_mode_t mode) { (void)mode; }
#endif

/* ---- the pool ---- */

static atomic_int limit = 1;
void kda_set_thread_limit(int n) { atomic_store_explicit(&limit, n, memory_order_relaxed); }
int kda_thread_limit(void) { return atomic_load_explicit(&limit, memory_order_relaxed); }

enum { IDLE, POSTED, RUNNING };

static struct slot {
    _Alignas(CACHE_LINE) _Atomic ptrdiff_t next; /* item of this thread's run, which ends before `end` */
    ptrdiff_t end;
    _Alignas(CACHE_LINE) atomic_int state; /* on a line of its own: watched while items are taken */
    atomic_int sleepers; /* asleep until the state changes: the worker or the caller, for a moment both */
    lock_t lock;
    cond_t changed;
} slots[KDA_MAX_THREADS]; /* [0]: the caller's, of which only the run is used */

static atomic_int busy;               /* whoever sets it owns what follows until all slots are idle again */
static int team = 1, expecting_forks; /* threads that there are, with the caller */
static kda_task_fn *current_task;     /* the job that is posted */
static const void *current_job;
static int current_threads;
static float_mode_t current_mode;

static void open_slot(struct slot *s) {
    atomic_store(&s->state, IDLE);
    atomic_store(&s->sleepers, 0);
    lock_init(&s->lock);
    cond_init(&s->changed);
}

static void wait_while(struct slot *s, int state) {
    for (int64_t end = 0;;) {
        for (int i = 0; i < PAUSES; i++) {
            if (atomic_load(&s->state) != state) return;
            pause_cpu();
        }
        int64_t now = now_ns();
        if (end == 0) end = now + SPIN_NS;
        if (now >= end) break;
    }
    lock(&s->lock);
    atomic_fetch_add(&s->sleepers, 1); /* before the state is read again, as wake reads it after the state is set */
    while (atomic_load(&s->state) == state) cond_wait(&s->changed, &s->lock);
    atomic_fetch_sub(&s->sleepers, 1);
    unlock(&s->lock);
}

static void change_state(struct slot *s, int state) {
    atomic_store(&s->state, state);
    if (!atomic_load(&s->sleepers)) return;
    lock(&s->lock); /* whoever is about to sleep sleeps now */
    unlock(&s->lock);
    cond_signal(&s->changed);
}

static void work(int thread) {
    int threads = current_threads;
    for (int i = 0; i < threads; i++) {
        struct slot *s = &slots[(thread + i) % threads];
        ptrdiff_t end = s->end;
        while (atomic_load_explicit(&s->next, memory_order_relaxed) < end) {
            ptrdiff_t item = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
            if (item < end) current_task(current_job, item, thread);
        }
    }
}

static void worker(int thread) {
    struct slot *s = &slots[thread];
    for (;;) {
        wait_while(s, IDLE);
        int posted = POSTED; /* or taken back meanwhile */
        if (!atomic_compare_exchange_strong(&s->state, &posted, RUNNING)) continue;
        set_float_mode(current_mode);
        work(thread);
        change_state(s, IDLE);
    }
}

#ifndef _WIN32
/* In a forked child: the workers did not come along, and another thread may have been in the middle of a job. */
static void forget_workers(void) {
    team = 1;
    atomic_store(&busy, 0);
}
#endif

/* At most `threads` threads, started where they are missing; fewer where the system refuses more. */
static int hire(int threads) {
    if (!expecting_forks) expect_forks();
    expecting_forks = 1;
    for (; team < threads; team++) {
        open_slot(&slots[team]);
        if (!start_worker(team)) break;
    }
    return threads < team ? threads : team;
}

/* items * t / threads, for any number of items. */
static ptrdiff_t run_start(ptrdiff_t items, int t, int threads) {
    return items / threads * t + items % threads * t / threads;
}

void kda_parallel_for(kda_task_fn *task, const void *job, ptrdiff_t first, ptrdiff_t items, int threads) {
    int idle = 0;
    if (threads > KDA_MAX_THREADS) threads = KDA_MAX_THREADS;
    if (threads > items) threads = (int)items;
    if (threads <= 1 || !atomic_compare_exchange_strong(&busy, &idle, 1)) {
        for (ptrdiff_t i = 0; i < items; i++) task(job, first + i, 0);
        return;
    }
    current_threads = threads = hire(threads);
    current_task = task, current_job = job, current_mode = float_mode();
    for (int t = 0; t < threads; t++) {
        atomic_store_explicit(&slots[t].next, first + run_start(items, t, threads), memory_order_relaxed);
        slots[t].end = first + run_start(items, t + 1, threads);
    }
    for (int t = 1; t < threads; t++) change_state(&slots[t], POSTED);
    work(0);
    for (int t = 1; t < threads; t++) {
        int posted = POSTED;
        if (!atomic_compare_exchange_strong(&slots[t].state, &posted, IDLE)) wait_while(&slots[t], RUNNING);
    }
    atomic_store(&busy, 0);
}

#endif
