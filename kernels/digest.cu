/* XXH3-64 of whole blocks where they lie in the KV cache, as a slot would hold them; alone, or while
 * the blocks move between the KV cache and a contiguous copy in device memory.
 *
 * XXH3 keeps eight lanes, 64-bit numbers. A stripe is 64 bytes, eight for each lane; a step is 16
 * stripes. The sums that a step adds to the lanes do not depend on their state. So all thread blocks
 * work out the sums of all steps. The last of them to be ready then adds each KV block's sums to its
 * lanes in order, which takes a few instructions per KiB. A kernel of its own would wait once more
 * for room beside the model's. The format is that of xxHash 0.8 (inputs over 240 bytes, default
 * secret, seed 0).
 *
 * table    `rows` runs of one block, in the order of their place
 * ids      `count` blocks
 * nbytes   of one block, over 240: shorter inputs have a formula of their own
 * sums     `count` times one row of eight sums per step
 * ready    thread blocks whose sums are there: 0 before and after
 * digests  `count` results; 0: blocks are only moved
 * staged   the contiguous copies, `stride` bytes apart, a multiple of 16
 *
 * It takes any number of thread blocks, of whole warps. */
#include "runs.cuh"

#define LANES 8 /* of XXH3; also threads per step, and threads per KV block when folding */
#define STRIPE 64
#define STEP_STRIPES 16
#define STEP_BYTES (STEP_STRIPES * STRIPE)
#define WORDS 8 /* 16-byte words of a step per thread, all on their way at a time */
#define AHEAD 16 /* sums that a lane reads ahead of the fold: what hides the latency of the L2 */
#define SCRAMBLE_AT 128 /* where in the secret, in bytes */
#define LAST_AT 121
#define MERGE_AT 11

#define PRIME32_1 0x9E3779B1ULL
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME_MX1 0x165667919E3779F9ULL

/* In global memory: the constant cache serves one address at a time, and lanes read different
 * ones. */
__device__ const u64 SECRET[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};

__device__ const u64 INITIAL[LANES] = {
    0x00000000c2b2ae3d, 0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9,
    0x85ebca77c2b2ae63, 0x0000000085ebca77, 0x27d4eb2f165667c5, 0x000000009e3779b1};

/* Eight bytes of the secret from byte `at` on, which is no multiple of eight. */
__device__ __forceinline__ u64 secret_at(int at) {
    return SECRET[at / 8] >> at % 8 * 8 | SECRET[at / 8 + 1] << (64 - at % 8 * 8);
}

/* The value of the thread whose number differs by `apart`. All threads of a warp come here. */
__device__ __forceinline__ u64 exchange(u64 value, int apart) {
    return __shfl_xor_sync(0xffffffff, value, apart);
}

/* One block of the KV cache. */
struct Block {
    const u8 *area;
    const Run *table;
    i64 rows, id;

    /* The run that holds byte `at`. */
    __device__ __forceinline__ i64 find_run(i64 at) const {
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

    /* The same, searched forward from run `row` on. */
    __device__ __forceinline__ i64 next_run(i64 row, i64 at) const {
        while (at >= table[row].place + table[row].length)
            row++;
        return row;
    }

    __device__ __forceinline__ const u8 *address(const Run &run, i64 at) const {
        return area + run.offset + id * run.stride + (at - run.place);
    }

    __device__ __forceinline__ u8 *byte(i64 at) const {
        return (u8 *)address(table[find_run(at)], at);
    }

    /* Write eight bytes from byte `at` on, as `read` reads them. */
    __device__ __forceinline__ void write(i64 *row, i64 at, u64 value) const {
        *row = next_run(*row, at);
        const Run run = table[*row];
        u8 *to = (u8 *)address(run, at);
        if (((u64)to & 7) == 0 && at + 8 <= run.place + run.length) {
            *(u64 *)to = value;
            return;
        }
        i64 here = *row;
#pragma unroll 1
        for (int i = 0; i < 8; i++) {
            here = next_run(here, at + i);
            *(u8 *)address(table[here], at + i) = (u8)(value >> (8 * i));
        }
    }

    /* Whether a whole step from byte `at` on lies in a run, aligned to 16 bytes. */
    __device__ __forceinline__ bool has_words(const Run &run, i64 at) const {
        return ((u64)address(run, at) & 15) == 0 && at + STEP_BYTES <= run.place + run.length;
    }

    /* Eight bytes from byte `at` on, little-endian, which may lie in several runs; `row` only
     * ever moves forward. */
    __device__ __forceinline__ u64 read(i64 *row, i64 at) const {
        *row = next_run(*row, at);
        const Run run = table[*row];
        const u8 *from = address(run, at);
        if (((u64)from & 7) == 0 && at + 8 <= run.place + run.length)
            return *(const u64 *)from;
        u64 value = 0;
        i64 here = *row;
#pragma unroll 1
        for (int i = 0; i < 8; i++) {
            here = next_run(here, at + i);
            value |= (u64)*address(table[here], at + i) << (8 * i);
        }
        return value;
    }
};

/* The contiguous copy of a block, aligned to 16 bytes, as `Block` shows one. */
struct Staged {
    u8 *start;

    __device__ __forceinline__ i64 find_run(i64) const { return 0; }
    __device__ __forceinline__ u8 *byte(i64 at) const { return start + at; }

    __device__ __forceinline__ u64 read(i64 *, i64 at) const {
        if ((at & 7) == 0)
            return *(const u64 *)(start + at);
        u64 value = 0;
#pragma unroll 1
        for (int i = 0; i < 8; i++)
            value |= (u64)start[at + i] << (8 * i);
        return value;
    }

    __device__ __forceinline__ void write(i64 *, i64 at, u64 value) const {
        *(u64 *)(start + at) = value;
    }
};

/* Two neighbouring lanes of a step: the sums of the values that they were given. */
struct LanePair {
    u64 even = 0, odd = 0;

    __device__ __forceinline__ void add(u64 to_even, u64 to_odd, u64 even_key, u64 odd_key) {
        const u64 even_word = to_even ^ even_key, odd_word = to_odd ^ odd_key;
        even += (u64)(u32)even_word * (even_word >> 32) + to_odd;
        odd += (u64)(u32)odd_word * (odd_word >> 32) + to_even;
    }
};

/* Eight threads work on a step. Thread t reads bytes 16 t to 16 t + 15 of every 128, which are two
 * lanes of every other stripe. These are the keys of its words. */
struct Keys {
    int pair, second; /* lanes 2 * pair and the next one, of even or odd stripes */
    u64 words[2 * WORDS];
    u64 last[2]; /* the same as the last two words, but for a block's last 64 bytes */

    __device__ __forceinline__ Keys(int thread) : pair(thread % 4), second(thread / 4) {
#pragma unroll
        for (int i = 0; i < 2 * WORDS; i++)
            words[i] = SECRET[2 * pair + second + i];
#pragma unroll
        for (int i = 0; i < 2; i++)
            last[i] = second ? secret_at(LAST_AT + 16 * pair + 8 * i) : words[2 * WORDS - 2 + i];
    }

    /* The sums of a whole step, from this thread's first word on; with MOVES, write it to `to`. */
    template <bool MOVES>
    __device__ __forceinline__ LanePair sum_words(const uint4 *from, uint4 *to,
                                                  bool ends_block) const {
        uint4 held[WORDS];
#pragma unroll
        for (int k = 0; k < WORDS; k++)
            held[k] = __ldcs(from + LANES * k);
        if (MOVES)
#pragma unroll
            for (int k = 0; k < WORDS; k++)
                __stcs(to + LANES * k, held[k]);
        LanePair sum;
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            const bool other = k == WORDS - 1 && ends_block;
            sum.add((u64)held[k].y << 32 | held[k].x, (u64)held[k].w << 32 | held[k].z,
                    other ? last[0] : words[2 * k], other ? last[1] : words[2 * k + 1]);
        }
        return sum;
    }

    /* The sums of any step from byte `at` on: short, or in several runs, or not aligned. */
    template <typename Source>
    __device__ __forceinline__ LanePair sum_bytes(const Source &block, i64 row, i64 at,
                                                  i64 nbytes) const {
        const bool ends_block = nbytes - at <= STEP_BYTES;
        const int stripes = ends_block ? (int)(nbytes - at - 1) / STRIPE : STEP_STRIPES;
        LanePair sum;
        for (int i = second; i < stripes; i += 2) {
            const i64 here = at + i * STRIPE + 16 * pair;
            const u64 to_even = block.read(&row, here), to_odd = block.read(&row, here + 8);
            sum.add(to_even, to_odd, SECRET[2 * pair + i], SECRET[2 * pair + i + 1]);
        }
        if (ends_block && second) { /* the last 64 bytes, which may overlap the stripe before */
            const i64 here = nbytes - STRIPE + 16 * pair;
            row = block.find_run(here);
            const u64 to_even = block.read(&row, here), to_odd = block.read(&row, here + 8);
            sum.add(to_even, to_odd, last[0], last[1]);
        }
        return sum;
    }
};

enum Way { IN_PLACE, TO_STAGED, FROM_STAGED };

/* Move bytes `at` to `end` of a block, a step or less, by eight threads. */
template <typename To, typename From>
__device__ __forceinline__ void move_bytes(const To &to, const From &from, i64 at, i64 end) {
    const int thread = (int)(threadIdx.x % LANES);
    i64 read_row = from.find_run(at), write_row = to.find_run(at);
    const i64 whole = at + (end - at) / 8 * 8;
#pragma unroll 1
    for (i64 here = at + 8 * thread; here < whole; here += 8 * LANES)
        to.write(&write_row, here, from.read(&read_row, here));
    for (i64 here = whole + thread; here < end; here += LANES)
        *to.byte(here) = *from.byte(here);
}

/* Groups of eight threads take neighbouring steps, so that their run is found once and then only
 * moves forward. */
template <Way WAY>
__device__ __forceinline__ void sum_steps(const u8 *area, const Run *table, i64 rows,
                                          const i64 *ids, i64 count, i64 nbytes, u64 *sums,
                                          u8 *staged, i64 stride, bool hashes) {
    const int thread = (int)(threadIdx.x % LANES);
    const Keys keys(thread);
    const i64 steps = (nbytes - 1) / STEP_BYTES + 1, all = steps * count;
    const i64 share = (all + num_groups(LANES) - 1) / num_groups(LANES);
    i64 item = first_group(LANES) * share, number = item / steps, at = item % steps * STEP_BYTES;
    i64 row = Block{area, table, rows, 0}.find_run(at);
    for (const i64 end = item + share; item < end; item++) {
        LanePair sum;
        if (item < all) {
            const Block pages{area, table, rows, ids[number]};
            const Staged copy{staged + number * stride};
            row = pages.next_run(row, at);
            const Run run = table[row];
            const bool ends_block = at + STEP_BYTES == nbytes;
            const uint4 *page = (const uint4 *)pages.address(run, at) + thread;
            uint4 *word = (uint4 *)copy.byte(at) + thread;
            if (pages.has_words(run, at)) {
                if (WAY == IN_PLACE)
                    sum = keys.sum_words<false>(page, 0, ends_block);
                else if (WAY == TO_STAGED)
                    sum = keys.sum_words<true>(page, word, ends_block);
                else
                    sum = keys.sum_words<true>(word, (uint4 *)page, ends_block);
            } else {
                const i64 last = at + STEP_BYTES < nbytes ? at + STEP_BYTES : nbytes;
                if (WAY == TO_STAGED)
                    move_bytes(copy, pages, at, last);
                if (WAY == FROM_STAGED)
                    move_bytes(pages, copy, at, last);
                if (WAY == FROM_STAGED && hashes)
                    sum = keys.sum_bytes(copy, 0, at, nbytes);
                else if (hashes)
                    sum = keys.sum_bytes(pages, row, at, nbytes);
            }
        }
        if (hashes) { /* The two threads of a pair of lanes each finish one. */
            const u64 given = exchange(keys.second ? sum.even : sum.odd, 4);
            if (item < all)
                sums[item * LANES + 2 * keys.pair + keys.second] =
                    given + (keys.second ? sum.odd : sum.even);
        }
        at += STEP_BYTES;
        if (at >= nbytes) {
            at = row = 0;
            number++;
        }
    }
}

__device__ __forceinline__ u64 scrambled(u64 state, u64 key) {
    return (state ^ state >> 47 ^ key) * PRIME32_1;
}

/* Eight threads fold a KV block, each one lane. The order is fixed, so it takes as long as its chain
 * of multiplications; KV blocks run side by side. What other thread blocks wrote is not in this
 * multiprocessor's cache. */
__device__ __forceinline__ void fold_steps(const u64 *sums, i64 count, i64 nbytes, u64 *digests) {
    const int lane = (int)(threadIdx.x % LANES);
    const u64 scramble = SECRET[SCRAMBLE_AT / 8 + lane], merge = secret_at(MERGE_AT + 8 * lane);
    const i64 full = (nbytes - 1) / STEP_BYTES; /* steps before the last, which is not scrambled */
    for (i64 first = 0; first < count; first += blockDim.x / LANES) {
        const i64 number = first + threadIdx.x / LANES;
        const i64 mine_full = number < count ? full : 0;
        const i64 batches = mine_full / AHEAD, rest = mine_full % AHEAD;
        const u64 *from = sums + (number < count ? number : 0) * (full + 1) * LANES + lane;
        u64 state = INITIAL[lane], first_sums[AHEAD], ahead[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            first_sums[k] = k < rest ? __ldcg(from + k * LANES) : 0;
            ahead[k] = batches ? __ldcg(from + (rest + k) * LANES) : 0;
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (k < rest)
                state = scrambled(state + first_sums[k], scramble);
        from += rest * LANES;
        for (i64 i = 1; i <= batches; i++) {
            from += AHEAD * LANES;
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                state = scrambled(state + ahead[k], scramble);
                if (i < batches)
                    ahead[k] = __ldcg(from + k * LANES);
            }
        }
        const u64 mine = (state + __ldcg(from)) ^ merge, other = exchange(mine, 1);
        u64 hash = (mine * other) ^ __umul64hi(mine, other);
        hash += exchange(hash, 2);
        hash += exchange(hash, 4) + (u64)nbytes * PRIME64_1;
        hash ^= hash >> 37;
        hash *= PRIME_MX1;
        if (lane == 0 && number < count)
            digests[number] = hash ^ hash >> 32;
    }
}

template <Way WAY>
__device__ __forceinline__ void hash_all(const u8 *area, const Run *table, i64 rows,
                                         const i64 *ids, i64 count, i64 nbytes, u64 *sums,
                                         u32 *ready, u64 *digests, u8 *staged, i64 stride) {
    const bool hashes = WAY == IN_PLACE || digests != 0;
    sum_steps<WAY>(area, table, rows, ids, count, nbytes, sums, staged, stride, hashes);
    if (!hashes)
        return;
    __threadfence();
    __syncthreads();
    __shared__ bool last;
    if (threadIdx.x == 0)
        last = atomicAdd(ready, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last)
        return;
    if (threadIdx.x == 0)
        *ready = 0;
    fold_steps(sums, count, nbytes, digests);
}

/* The registers hold the keys, for one thread block per multiprocessor. */
extern "C" __global__ void __launch_bounds__(512, 1)
    hash_blocks(const u8 *area, const Run *table, i64 rows, const i64 *ids, i64 count, i64 nbytes,
                u64 *sums, u32 *ready, u64 *digests) {
    hash_all<IN_PLACE>(area, table, rows, ids, count, nbytes, sums, ready, digests, 0, 0);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    gather_staged(const u8 *area, const Run *table, i64 rows, const i64 *ids, i64 count, i64 nbytes,
                  u64 *sums, u32 *ready, u64 *digests, u8 *staged, i64 stride) {
    hash_all<TO_STAGED>(area, table, rows, ids, count, nbytes, sums, ready, digests, staged, stride);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    scatter_staged(u8 *area, const Run *table, i64 rows, const i64 *ids, i64 count, i64 nbytes,
                   u64 *sums, u32 *ready, u64 *digests, u8 *staged, i64 stride) {
    hash_all<FROM_STAGED>(area, table, rows, ids, count, nbytes, sums, ready, digests, staged,
                          stride);
}
