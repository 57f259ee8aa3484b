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
