/* kda/_simd/threads.c alone, for ThreadSanitizer and for compilers of other systems:
 *
 *   cc -std=c11 -pthread -fsanitize=thread -Ikda/_simd tests/pool_check.c kda/_simd/threads.c -o check && ./check
 *
 * Prints "ok" and exits with 0, or says what went wrong and exits with 1. */
#define _POSIX_C_SOURCE 200809L
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

enum { ITEMS = 257, CALLERS = 4, ROUNDS = 400, TEAM = 5 };

static void fail(const char *what) {
    printf("failed: %s\n", what);
    exit(1);
}

static void pause_us(long us) { nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL); }

/* Each item counts itself in plain memory: a race, or an item lost or done twice, is seen. */
struct tally {
    int counts[ITEMS];
    int by_thread[TEAM]; /* as scratch memory is: one task at a time has a thread's part */
};

static void count(const void *job, ptrdiff_t item, int thread) {
    struct tally *tally = (struct tally *)job;
    tally->counts[item]++;
    tally->by_thread[thread]++;
}

static void once(int items, int threads, int nested);
static void count_within(const void *job, ptrdiff_t item, int thread) {
    once(3, TEAM, 0);
    count(job, item, thread);
}

static void once(int items, int threads, int nested) {
    struct tally tally = {0};
    int sum = 0;
    kda_parallel_for(nested ? count_within : count, &tally, 0, items, threads);
    for (int i = 0; i < ITEMS; i++)
        if (tally.counts[i] != (i < items)) fail("an item was not done once");
    for (int t = 0; t < TEAM; t++) sum += tally.by_thread[t];
    if (sum != items) fail("a thread number is wrong");
}

static void *caller(void *seed_) {
    unsigned seed = (unsigned)(size_t)seed_;
    for (int i = 0; i < ROUNDS; i++) {
        seed = seed * 1664525 + 1013904223;
        once((int)(seed >> 8) % (ITEMS + 1), (int)(seed >> 20) % (TEAM + 1), i % 8 == 0);
        if (seed >> 28 == 0) pause_us(seed >> 21 & 127);
    }
    return NULL;
}

/* Every item waits for all the others to have begun, so it takes as many threads as there are items. */
struct meeting {
    atomic_int there;
    int expected;
};

static void meet(const void *job, ptrdiff_t item, int thread) {
    struct meeting *m = (struct meeting *)job;
    time_t end = time(NULL) + 20;
    (void)item, (void)thread;
    atomic_fetch_add(&m->there, 1);
    while (atomic_load(&m->there) < m->expected)
        if (time(NULL) > end) fail("a worker did not wake");
}

static void all_meet(int threads) {
    struct meeting m = {.expected = threads};
    kda_parallel_for(meet, &m, 0, threads, threads);
}

int main(void) {
    pthread_t ids[CALLERS];
    for (int i = 0; i < ROUNDS; i++) { /* workers that spin, fall asleep just now, and sleep */
        all_meet(2 + i % (TEAM - 1));
        once(i % 7, TEAM, 0);
        pause_us(i % 80);
    }
    for (size_t i = 0; i < CALLERS; i++) pthread_create(&ids[i], NULL, caller, (void *)(i + 1));
    for (size_t i = 0; i < CALLERS; i++) pthread_join(ids[i], NULL);
    all_meet(TEAM);
#if !defined(_WIN32) && \
    !defined(__SANITIZE_THREAD__) /* which starts no threads in the child of a program with some */
    for (int i = 0; i < 20; i++) {
        int status = -1;
        pthread_create(&ids[0], NULL, caller, (void *)99); /* in the middle of a job while the child is made */
        pid_t child = fork();
        if (child == 0) {
            all_meet(TEAM);
            once(ITEMS, TEAM, 1);
            _exit(0);
        }
        pthread_join(ids[0], NULL);
        if (waitpid(child, &status, 0) != child || status != 0) fail("a forked child");
    }
#endif
    puts("ok");
    return 0;
}
