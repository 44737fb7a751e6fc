/* The kernels' own sources, compiled for the CPU, with one entry: run(name, grid, block, seed,
 * arguments), where an argument is the address of its value, as cuLaunchKernel wants it. */
#include "cuda_on_host.h"

#include <csetjmp>
#include <csignal>
#include <cstring>

#include "blocks.cu"
#include "digest.cu"
#include "pages.cu"

template <typename T> static T value(void **a, int i) { return *(T *)a[i]; }

template <void (*kernel)(u8 *, u8 *, const Run *, i64, const i64 *, i64, i64, i64)>
static void pages(void **a) {
    kernel(value<u8 *>(a, 0), value<u8 *>(a, 1), value<const Run *>(a, 2), value<i64>(a, 3),
           value<const i64 *>(a, 4), value<i64>(a, 5), value<i64>(a, 6), value<i64>(a, 7));
}

template <void (*kernel)(u8 *, u8 *, const Run *, i64, i64, const i64 *, i64, i64, i64)>
static void blocks(void **a) {
    kernel(value<u8 *>(a, 0), value<u8 *>(a, 1), value<const Run *>(a, 2), value<i64>(a, 3),
           value<i64>(a, 4), value<const i64 *>(a, 5), value<i64>(a, 6), value<i64>(a, 7),
           value<i64>(a, 8));
}

static void hash(void **a) {
    hash_blocks(value<const u8 *>(a, 0), value<const Run *>(a, 1), value<i64>(a, 2),
                value<const i64 *>(a, 3), value<i64>(a, 4), value<i64>(a, 5), value<u64 *>(a, 6),
                value<u32 *>(a, 7), value<u64 *>(a, 8));
}

template <typename Area, void (*kernel)(Area *, const Run *, i64, const i64 *, i64, i64, u64 *,
                                        u32 *, u64 *, u8 *, i64)>
static void staged(void **a) {
    kernel(value<Area *>(a, 0), value<const Run *>(a, 1), value<i64>(a, 2),
           value<const i64 *>(a, 3), value<i64>(a, 4), value<i64>(a, 5), value<u64 *>(a, 6),
           value<u32 *>(a, 7), value<u64 *>(a, 8), value<u8 *>(a, 9), value<i64>(a, 10));
}

static const struct {
    const char *name;
    int arguments;
    void (*body)(void **);
} kernels[] = {
    {"gather_pages", 8, pages<gather_pages>},
    {"scatter_pages", 8, pages<scatter_pages>},
    {"pack_blocks", 9, blocks<pack_blocks>},
    {"unpack_blocks", 9, blocks<unpack_blocks>},
    {"hash_blocks", 9, hash},
    {"gather_staged", 11, staged<const u8, gather_staged>},
    {"scatter_staged", 11, staged<u8, scatter_staged>},
};

extern "C" int count_arguments(const char *name) {
    for (const auto &kernel : kernels)
        if (strcmp(kernel.name, name) == 0)
            return kernel.arguments;
    return -1;
}

extern "C" int run(const char *name, unsigned grid, unsigned threads, unsigned seed, void **a) {
    for (const auto &kernel : kernels)
        if (strcmp(kernel.name, name) == 0) {
            body = kernel.body;
            arguments = a;
            run_grid(grid, threads, seed);
            return 0;
        }
    return 1;
}

/* As run(), of a device: an address that is not there, or not aligned to what it is read as, ends
 * the kernel with the driver's error. */
static sigjmp_buf before;
static thread_local bool is_device;

static void fault(int number) {
    if (is_device)
        siglongjmp(before, number);
    signal(number, SIG_DFL);
}

extern "C" int run_on_device(const char *name, unsigned grid, unsigned threads, void **a) {
    enum { ILLEGAL_ADDRESS = 700, MISALIGNED_ADDRESS = 716 };
    const int numbers[] = {SIGSEGV, SIGBUS, SIGILL};
    struct sigaction theirs[3], ours = {};
    ours.sa_handler = fault;
    ours.sa_flags = SA_NODEFER;
    for (int i = 0; i < 3; i++)
        sigaction(numbers[i], &ours, &theirs[i]);
    is_device = true;
    const int number = sigsetjmp(before, 1);
    int status = number == SIGILL ? MISALIGNED_ADDRESS : ILLEGAL_ADDRESS;
    if (!number)
        status = run(name, grid, threads, 0, a);
    is_device = false;
    for (int i = 0; i < 3; i++)
        sigaction(numbers[i], &theirs[i], nullptr);
    return status;
}
