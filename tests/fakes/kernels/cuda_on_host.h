/* Enough of CUDA to run the kernels' own source on a CPU: every thread is a fiber, so that threads
 * can exchange values; blocks run one after the other. A seed shuffles them, and their threads. */
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>

#define __global__
#define __device__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Dim {
    unsigned x, y, z;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

template <typename T> static inline T __ldcs(const T *from) { return *from; }
template <typename T> static inline T __ldcg(const T *from) { return *from; }
template <typename T> static inline void __stcs(T *to, T value) { *to = value; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}

#define MOST_THREADS 128

struct Fiber {
    ucontext_t context;
    unsigned number;
    bool ended;
};
static ucontext_t scheduler;
static Fiber *running;
static void (*body)(void **);
static void **arguments;

/* Wait until every thread of the block came to a barrier, or ended. */
static inline void barrier() { swapcontext(&running->context, &scheduler); }

/* All threads of a warp come here together, so two barriers keep them in step. */
static inline unsigned long long __shfl_xor_sync(unsigned mask, unsigned long long value,
                                                 unsigned apart) {
    static unsigned long long given[MOST_THREADS];
    if (mask != 0xffffffff || blockDim.x % 32 || apart > 31)
        abort();
    given[threadIdx.x] = value;
    barrier();
    const unsigned long long found = given[threadIdx.x ^ apart];
    barrier();
    return found;
}

static inline void __syncthreads() { barrier(); }
static inline void __threadfence() {}
static inline unsigned atomicAdd(unsigned *at, unsigned more) {
    const unsigned before = *at;
    *at += more;
    return before;
}

static void enter() {
    body(arguments);
    running->ended = true;
    swapcontext(&running->context, &scheduler);
}

#define STACK_BYTES (1 << 15)

static Fiber fibers[MOST_THREADS];
alignas(16) static char stacks[MOST_THREADS][STACK_BYTES];

/* Run every thread of a block up to its next barrier, until all have ended. */
static void run_block(unsigned threads, unsigned seed) {
    if (threads > MOST_THREADS)
        abort();
    for (unsigned i = 0; i < threads; i++) {
        Fiber *fiber = &fibers[i];
        fiber->number = (i * 7919u + seed) % threads; /* 7919 is prime: each number once */
        fiber->ended = false;
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = stacks[i];
        fiber->context.uc_stack.ss_size = STACK_BYTES;
        fiber->context.uc_link = nullptr;
        makecontext(&fiber->context, enter, 0);
    }
    for (unsigned left = threads; left > 0;) {
        left = 0;
        for (unsigned i = 0; i < threads; i++) {
            if (fibers[i].ended)
                continue;
            running = &fibers[i];
            threadIdx = {fibers[i].number, 0, 0};
            swapcontext(&scheduler, &fibers[i].context);
            left += !fibers[i].ended;
        }
    }
}

static void run_grid(unsigned blocks, unsigned threads, unsigned seed) {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (unsigned i = 0; i < blocks; i++) {
        blockIdx = {(i * 7919u + seed) % blocks, 0, 0};
        run_block(threads, seed + i);
    }
}
