/* Byte runs: the table that says where they are, and moving one with a group of lanes.
 *
 * No torch, no standard headers: this has to compile with nvcc, with NVRTC, and (for the tests)
 * with a C++ compiler for the CPU. */
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

/* One run of every block: block b owns [offset + b * stride, + length) of the KV cache; the run
 * lies at `place` within the block's contiguous copy. */
struct Run {
    i64 offset, stride, length, place;
};

#define IN_FLIGHT 8 /* loads of a lane on their way at a time: what hides the latency of PCIe */

/* Copy `count` whole words, lane after lane; both ends are aligned to them. */
template <typename Word>
__device__ __forceinline__ void copy_words(Word *to, const Word *from, i64 count, int lane,
                                           int lanes) {
    i64 i = lane;
    for (; i + (i64)(IN_FLIGHT - 1) * lanes < count; i += (i64)IN_FLIGHT * lanes) {
        Word held[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            held[k] = __ldcs(from + i + (i64)k * lanes);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            __stcs(to + i + (i64)k * lanes, held[k]);
    }
    for (; i < count; i += lanes)
        __stcs(to + i, __ldcs(from + i));
}

/* Copy a run whose ends have the same remainder modulo the word: bytes to the first boundary,
 * words, bytes after the last one. */
template <typename Word>
__device__ __forceinline__ void copy_aligned(u8 *to, const u8 *from, i64 length, int lane,
                                             int lanes) {
    i64 head = (i64)((sizeof(Word) - ((u64)to & (sizeof(Word) - 1))) & (sizeof(Word) - 1));
    head = head < length ? head : length;
    const i64 words = (length - head) / (i64)sizeof(Word);
    const i64 tail = head + words * (i64)sizeof(Word);
    for (i64 i = lane; i < head; i += lanes)
        to[i] = from[i];
    copy_words((Word *)(to + head), (const Word *)(from + head), words, lane, lanes);
    for (i64 i = tail + lane; i < length; i += lanes)
        to[i] = from[i];
}

/* Copy a run with the widest accesses that both ends allow. */
__device__ __forceinline__ void copy_run(u8 *to, const u8 *from, i64 length, int lane, int lanes) {
    const u64 apart = (u64)to ^ (u64)from;
    if ((apart & 15) == 0)
        copy_aligned<uint4>(to, from, length, lane, lanes);
    else if ((apart & 7) == 0)
        copy_aligned<u64>(to, from, length, lane, lanes);
    else if ((apart & 3) == 0)
        copy_aligned<u32>(to, from, length, lane, lanes);
    else
        copy_words(to, from, length, lane, lanes);
}

/* Groups of `lanes` threads take runs in turn; this thread's group is number `first_group()`. */
__device__ __forceinline__ i64 first_group(i64 lanes) {
    return ((i64)blockIdx.x * blockDim.x + threadIdx.x) / lanes;
}

__device__ __forceinline__ i64 num_groups(i64 lanes) {
    return (i64)gridDim.x * blockDim.x / lanes;
}
