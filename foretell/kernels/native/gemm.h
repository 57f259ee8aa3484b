// Matrix products, divided among the threads of a team.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace foretell {

constexpr int64_t kMinParallelProducts = 1 << 17;  // multiplications from which using more threads pays

constexpr int64_t kMinParallelFloats = 1 << 12;  // floats of row-wise operations from which using more threads pays
constexpr int64_t kTileQueries = 24;             // queries of an attention tile, which share cached blocks of keys

// Call f(row) for each row of `width` floats, on several threads if that pays.
template <class F>
void by_rows(Team& team, int64_t rows, int64_t width, const F& f) {
    if (rows * width < kMinParallelFloats || team.threads() == 1) {
        for (int64_t row = 0; row < rows; ++row) f(row);
        return;
    }
    const int64_t each = ceil_div(rows, 4 * team.threads());
    team.each(ceil_div(rows, each), [&](int64_t chunk) {
        for (int64_t row = chunk * each; row < std::min((chunk + 1) * each, rows); ++row) f(row);
    });
}

// Return the rows of an attention tile: enough to share blocks of keys, few enough to occupy every thread.
inline int64_t tile_rows(const Team& team, int64_t rows, int64_t heads, int64_t kv_heads) {
    int64_t most = std::max<int64_t>(1, kTileQueries / (heads / kv_heads));
    while (most > 2 && team.threads() > 1 && rows * kv_heads / most < 2 * team.threads()) most = ceil_div(most, 2);
    return most;
}

// Working memory of one attention tile.
struct AttendScratch {
    std::vector<float> floats;
    std::vector<int64_t> firsts;
};

// A buffer for quantized rows.
class QuantizedInputs {
  public:
    // Return rows x [count, inputs] in the format that the weights need.
    Rows quantize(Team& team, const Weights& weights, const float* x, int64_t count);

  private:
    std::vector<int8_t> values_;
    std::vector<float> scales_;
    std::vector<int32_t> offsets_;
};

// Multiply the rows by the weights, into y [count, outputs].
void multiply(Team& team, const Weights& weights, const Rows& rows, int64_t count, float* y);

}  // namespace foretell
