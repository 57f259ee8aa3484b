// Divides rows into tiles of as many rows as a kernel processes at once.
#pragma once

#include "kernels.h"

namespace foretell {
namespace {  // one copy per instruction set

constexpr int64_t kPrefetchBytes = 6144;  // how far ahead of its own reads a single tile prefetches: 100 ns of reads
constexpr int64_t kNearBytes = 24576;     // two blocks of this size fit into the L1 cache

// Weights to prefetch while others are multiplied: `step` bytes per group.
struct Prefetch {
    const uint8_t* at;
    int64_t step;
    bool is_streamed;  // into the L1 cache alone, so that weights that are read once displace nothing in L2 and L3

    inline __attribute__((always_inline)) void fetch() {
        const uint8_t* const end = at + step;
        if (is_streamed)
            for (; at < end; at += kLine) __builtin_prefetch(at, 0, 0);
        else
            for (; at < end; at += kLine) __builtin_prefetch(at, 0, 3);
    }
};

// Multiply a fixed number of rows, from `row` on, by one block of outputs.
using RowTile = void (*)(
    const Weights& weights, const Rows& rows, int64_t row, int64_t block, Prefetch prefetch, float* y);

// tile_kernels[i] takes i + 1 rows. Tiles are about equally high: a tile of one row after one of six would read the
// weights again for a single row. A single tile prefetches a little ahead of itself, which the hardware does too late.
// Of several, the first waits for the block's weights, so all prefetch the next block.
template <int N>
void for_row_tiles(const RowTile (&tile_kernels)[N], const Weights& weights, const Rows& rows, int64_t first,
                   int64_t stop, int64_t block, int64_t group_bytes, float* y) {
    int64_t tiles = (stop - first + N - 1) / N;
    const int64_t block_bytes = rows.groups * group_bytes, ahead = tiles > 1 ? block_bytes : kPrefetchBytes;
    const bool is_streamed = !rows.reuses_weights && (tiles == 1 || block_bytes <= kNearBytes);
    const int64_t step = (group_bytes / kLine + tiles - 1) / tiles * kLine;
    const uint8_t* next = weights.packed + block * block_bytes + ahead;
    for (; tiles > 0; --tiles, next += rows.groups * step) {
        const int64_t count = (stop - first + tiles - 1) / tiles;
        tile_kernels[count - 1](weights, rows, first, block, Prefetch{next, step, is_streamed}, y);
        first += count;
    }
}

}  // namespace
}  // namespace foretell
