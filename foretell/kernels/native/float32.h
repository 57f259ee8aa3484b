// Float32 matrix product. Each output adds its inputs from first to last, whatever other rows are in the batch.
#pragma once

#include "row_tiles.h"

namespace foretell {
namespace {

constexpr int64_t kInputBytes = kBlock * sizeof(float);  // weights of one input in a block

FORETELL_INLINE void store_output(const Weights& weights, V sum, int64_t output, float* y) {
    const int64_t valid = weights.outputs - output;
    if (valid <= 0) return;
    if (weights.bias != nullptr) sum = Lanes::add(sum, Lanes::load_some(weights.bias + output, valid));
    Lanes::store_some(y + output, sum, valid);
}

template <int R>
void float_rows(const Weights& weights, const Rows& rows, int64_t row, int64_t block, Prefetch prefetch, float* y) {
    const int64_t inputs = weights.inputs;
    const float* const x = rows.x + row * inputs;
    for (int part = 0; part < kBlock; part += 2 * Lanes::kCount) {
        const float* w = reinterpret_cast<const float*>(weights.packed + block * inputs * kInputBytes) + part;
        V sum[R][2];
        for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = Lanes::zero();
        for (int64_t k = 0; k < inputs; ++k, w += kBlock) {
            const V w0 = Lanes::load(w), w1 = Lanes::load(w + Lanes::kCount);
            if (part == 0) prefetch.fetch();
            for (int r = 0; r < R; ++r) {
                const V input = Lanes::all(x[r * inputs + k]);
                sum[r][0] = Lanes::fma(input, w0, sum[r][0]);
                sum[r][1] = Lanes::fma(input, w1, sum[r][1]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int h = 0; h < 2; ++h)
                store_output(weights, sum[r][h], block * kBlock + part + h * Lanes::kCount,
                             y + (row + r) * weights.outputs);
    }
}

template <int... R>
struct FloatRows {
    // Some compilers do not deduce the length.
    static constexpr RowTile tile_kernels[sizeof...(R)] = {float_rows<R>...};
};
using UpToSix = FloatRows<1, 2, 3, 4, 5, 6>;
using UpToTwelve = FloatRows<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>;

void float32(const Weights& weights, const Rows& rows, int64_t first, int64_t stop, int64_t block, float* y) {
    if constexpr (Lanes::kRows == 12)
        for_row_tiles(UpToTwelve::tile_kernels, weights, rows, first, stop, block, kInputBytes, y);
    else
        for_row_tiles(UpToSix::tile_kernels, weights, rows, first, stop, block, kInputBytes, y);
}

}  // namespace
}  // namespace foretell
