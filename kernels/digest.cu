/* XXH3-64 of whole blocks where they lie in the KV cache, as a slot would hold them.
 *
 * XXH3 folds 1 KiB steps into eight accumulators, one after the other; but what a step adds to
 * them does not depend on their state. So 128 threads work out the sums of 16 steps at a time, and
 * eight of them fold those in, which is a few instructions per KiB. Thread blocks take KV blocks
 * in turn. The format is that of xxHash 0.8 (inputs over 240 bytes, default secret, seed 0).
 *
 * table    `rows` runs of one block, in the order of their place
 * pairs    `count` times (block, slot); the slot is not looked at
 * nbytes   of one block, over 240: shorter inputs have a formula of their own
 * digests  `count` results */
#include "runs.cuh"

#define THREADS 128
#define LANES 8
#define STEPS (THREADS / LANES)
#define STRIPE 64
#define STEP_STRIPES 16
#define STEP_BYTES (STEP_STRIPES * STRIPE)
#define SCRAMBLE_AT 128 /* where in the secret */
#define LAST_AT 121
#define MERGE_AT 11

__device__ __constant__ const u8 SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

#define PRIME32_1 0x9E3779B1ULL
#define PRIME32_2 0x85EBCA77ULL
#define PRIME32_3 0xC2B2AE3DULL
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL

__device__ __forceinline__ u64 secret_at(int at) {
    u64 value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | SECRET[at + i];
    return value;
}

__device__ __forceinline__ u64 initial(int lane) {
    switch (lane) {
    case 0: return PRIME32_3;
    case 1: return PRIME64_1;
    case 2: return PRIME64_2;
    case 3: return PRIME64_3;
    case 4: return PRIME64_4;
    case 5: return PRIME32_2;
    case 6: return PRIME64_5;
    default: return PRIME32_1;
    }
}

/* The run that holds byte `at` of a block. */
__device__ __forceinline__ i64 find_run(const Run *table, i64 rows, i64 at) {
    i64 low = 0, high = rows;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (table[middle].place <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Eight bytes of a block from byte `at` on, little-endian; `row` only ever moves forward. */
__device__ __forceinline__ u64 read_u64(const u8 *area, const Run *table, i64 *row, i64 block,
                                        i64 at) {
    while (at >= table[*row].place + table[*row].length)
        ++*row;
    const Run run = table[*row];
    const u8 *from = area + run.offset + block * run.stride + (at - run.place);
    if (((u64)from & 7) == 0 && at + 8 <= run.place + run.length)
        return *(const u64 *)from;
    u64 value = 0;
    i64 here = *row;
    for (int i = 0; i < 8; i++) {
        while (at + i >= table[here].place + table[here].length)
            here++;
        const Run part = table[here];
        value |= (u64)area[part.offset + block * part.stride + (at + i - part.place)] << (8 * i);
    }
    return value;
}

/* What a stripe adds to its own accumulator and to the neighbouring one. */
__device__ __forceinline__ void add_stripe(u64 value, int secret, u64 *own, u64 *other) {
    const u64 key = value ^ secret_at(secret);
    *own += (u64)(u32)key * (key >> 32);
    *other += value;
}

__device__ __forceinline__ u64 fold(u64 a, u64 b) {
    return (a * b) ^ __umul64hi(a, b);
}

__device__ __forceinline__ u64 merged(const u64 *lanes, i64 nbytes) {
    u64 hash = (u64)nbytes * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        hash += fold(lanes[i] ^ secret_at(MERGE_AT + 8 * i),
                     lanes[i + 1] ^ secret_at(MERGE_AT + 8 * i + 8));
    hash ^= hash >> 37;
    hash *= PRIME_MX1;
    return hash ^ hash >> 32;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    digest_pages(const u8 *area, const Run *table, i64 rows, const i64 *pairs, i64 count,
                 i64 nbytes, u64 *digests) {
    __shared__ u64 own[STEPS][LANES], other[STEPS][LANES], lanes[LANES];
    const int lane = (int)(threadIdx.x % LANES), mine = (int)(threadIdx.x / LANES);
    const i64 full = (nbytes - 1) / STEP_BYTES; /* steps before the last, which is not scrambled */
    for (i64 number = blockIdx.x; number < count; number += gridDim.x) {
        const i64 block = pairs[2 * number];
        u64 accumulator = initial(lane);
        for (i64 first = 0; first <= full; first += STEPS) {
            const i64 step = first + mine;
            u64 to_own = 0, to_other = 0;
            if (step <= full) {
                const i64 start = step * STEP_BYTES;
                const i64 stripes =
                    step < full ? (i64)STEP_STRIPES : (nbytes - 1 - start) / STRIPE;
                i64 row = find_run(table, rows, start + 8 * lane);
                for (i64 i = 0; i < stripes; i++)
                    add_stripe(read_u64(area, table, &row, block, start + i * STRIPE + 8 * lane),
                               (int)(8 * i) + 8 * lane, &to_own, &to_other);
                if (step == full) { /* the last 64 bytes, which may overlap the stripe before */
                    row = find_run(table, rows, nbytes - STRIPE + 8 * lane);
                    add_stripe(read_u64(area, table, &row, block, nbytes - STRIPE + 8 * lane),
                               LAST_AT + 8 * lane, &to_own, &to_other);
                }
            }
            own[mine][lane] = to_own;
            other[mine][lane ^ 1] = to_other;
            __syncthreads();
            for (int k = 0; mine == 0 && k < STEPS && first + k <= full; k++) {
                accumulator += own[k][lane] + other[k][lane];
                if (first + k < full)
                    accumulator = (accumulator ^ accumulator >> 47 ^
                                   secret_at(SCRAMBLE_AT + 8 * lane)) * PRIME32_1;
            }
            __syncthreads();
        }
        if (mine == 0)
            lanes[lane] = accumulator;
        __syncthreads();
        if (threadIdx.x == 0)
            digests[number] = merged(lanes, nbytes);
        __syncthreads();
    }
}
