/* The kernels' own sources, compiled for the CPU, with one entry: run(name, grid, block, seed,
 * arguments), where an argument is the address of its value, as cuLaunchKernel wants it. */
#include "cuda_on_host.h"

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

extern "C" int run(const char *name, unsigned grid, unsigned threads, unsigned seed, void **a) {
    struct {
        const char *name;
        void (*body)(void **);
    } const kernels[] = {
        {"gather_pages", pages<gather_pages>},   {"scatter_pages", pages<scatter_pages>},
        {"pack_blocks", blocks<pack_blocks>},    {"unpack_blocks", blocks<unpack_blocks>},
        {"hash_blocks", hash},
        {"gather_staged", staged<const u8, gather_staged>},
        {"scatter_staged", staged<u8, scatter_staged>},
    };
    for (const auto &kernel : kernels)
        if (strcmp(kernel.name, name) == 0) {
            body = kernel.body;
            arguments = a;
            run_grid(grid, threads, seed);
            return 0;
        }
    return 1;
}
