/* Wire blocks of a hand-off: some heads and some tokens of a page, in the order both sides agreed
 * on. Packing here and unpacking there turns one head split and block size into another.
 *
 * table   `phases` times `rows` runs; wire block w is part w % phases of page w / phases
 * ids     `count` wire blocks; the i-th lies at i * block_bytes of `staged`
 * lanes   threads per run: a power of two up to 32. Runs are single rows where heads lie apart,
 *         so a whole warp per run would mostly idle */
#include "runs.cuh"

template <bool PACK>
__device__ __forceinline__ void move_blocks(u8 *area, u8 *staged, const Run *table, i64 rows,
                                            i64 phases, const i64 *ids, i64 count,
                                            i64 block_bytes, i64 lanes) {
    const int lane = (int)(threadIdx.x % (u32)lanes), width = (int)lanes;
    for (i64 item = first_group(lanes); item < rows * count; item += num_groups(lanes)) {
        const i64 number = item / rows;
        const i64 id = ids[number];
        const Run run = table[id % phases * rows + item % rows];
        u8 *page = area + run.offset + id / phases * run.stride;
        u8 *wire = staged + number * block_bytes + run.place;
        if (PACK)
            copy_run(wire, page, run.length, lane, width);
        else
            copy_run(page, wire, run.length, lane, width);
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    pack_blocks(u8 *area, u8 *staged, const Run *table, i64 rows, i64 phases, const i64 *ids,
                i64 count, i64 block_bytes, i64 lanes) {
    move_blocks<true>(area, staged, table, rows, phases, ids, count, block_bytes, lanes);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    unpack_blocks(u8 *area, u8 *staged, const Run *table, i64 rows, i64 phases, const i64 *ids,
                  i64 count, i64 block_bytes, i64 lanes) {
    move_blocks<false>(area, staged, table, rows, phases, ids, count, block_bytes, lanes);
}
