// Many rows, as many at a time as a kernel takes.
#pragma once

#include "kernels.h"

namespace foretell {
namespace {  // each set of instructions has its own

// What to fetch from memory meanwhile, so that it is there when its turn comes: `step` bytes for each group.
struct Ahead {
    const uint8_t* at;
    int64_t step;

    inline __attribute__((always_inline)) void fetch() {
        for (const uint8_t* const end = at + step; at < end; at += kLine) __builtin_prefetch(at, 0, 2);
    }
};

// As many rows as the kernel is made for, from `row` on, times one block of outputs.
using FewRows = void (*)(
    const Weights& weights, const Rows& rows, int64_t row, int64_t block, Ahead ahead, float* y);

// few[i] takes i + 1 rows. Turns are about equally long: six rows and one would be six reads of the weights for one.
// The first turn waits for the block's weights to come from memory; the others fetch those of the next block.
template <int N>
void in_turns(const FewRows (&few)[N], const Weights& weights, const Rows& rows, int64_t first, int64_t stop,
              int64_t block, int64_t group_bytes, float* y) {
    const uint8_t* next = weights.packed + (block + 1) * rows.groups * group_bytes;
    int64_t turns = (stop - first + N - 1) / N;
    const int64_t step = turns > 1 ? (group_bytes / kLine + turns - 1) / turns * kLine : 0;
    for (; turns > 0; --turns, next += rows.groups * step) {
        const int64_t now = (stop - first + turns - 1) / turns;
        few[now - 1](weights, rows, first, block, Ahead{next, step}, y);
        first += now;
    }
}

}  // namespace
}  // namespace foretell
