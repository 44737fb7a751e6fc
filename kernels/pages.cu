/* Whole blocks between a KV cache and the slots of a host arena.
 *
 * area    the KV cache; arena: page-locked host memory, slots of `slot_bytes`
 * table   `rows` runs of one block, long ones cut so that no group of lanes has much more to do
 *         than another
 * pairs   `count` times (block, slot)
 * lanes   threads per run: a power of two up to 32
 *
 * A few thread blocks are enough to fill PCIe; the others would only take room from the model. */
#include "runs.cuh"

template <bool STORE>
__device__ __forceinline__ void move_pages(u8 *area, u8 *arena, const Run *table, i64 rows,
                                           const i64 *pairs, i64 count, i64 slot_bytes,
                                           i64 lanes) {
    const int lane = (int)(threadIdx.x % (u32)lanes), width = (int)lanes;
    for (i64 item = first_group(lanes); item < rows * count; item += num_groups(lanes)) {
        const Run run = table[item % rows];
        const i64 pair = item / rows;
        u8 *page = area + run.offset + pairs[2 * pair] * run.stride;
        u8 *slot = arena + pairs[2 * pair + 1] * slot_bytes + run.place;
        if (STORE)
            copy_run(slot, page, run.length, lane, width);
        else
            copy_run(page, slot, run.length, lane, width);
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    gather_pages(u8 *area, u8 *arena, const Run *table, i64 rows, const i64 *pairs, i64 count,
                 i64 slot_bytes, i64 lanes) {
    move_pages<true>(area, arena, table, rows, pairs, count, slot_bytes, lanes);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    scatter_pages(u8 *area, u8 *arena, const Run *table, i64 rows, const i64 *pairs, i64 count,
                  i64 slot_bytes, i64 lanes) {
    move_pages<false>(area, arena, table, rows, pairs, count, slot_bytes, lanes);
}
