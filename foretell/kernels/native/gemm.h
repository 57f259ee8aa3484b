// Matrix products, divided among the threads of a team.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "pool.h"
#include "scratch.h"

namespace foretell {

constexpr int64_t kMinParallelProducts = 1 << 17;  // multiplications from which using more threads pays

constexpr int64_t kMinParallelFloats = 1 << 12;  // floats of row-wise operations from which using more threads pays

// Call f(row) for each row of `width` floats, on several threads if that pays.
template <class F>
void by_rows(Team& team, int64_t rows, int64_t width, const F& f) {
    if (rows * width >= kMinParallelFloats)
        team.split(rows, f);
    else
        for (int64_t row = 0; row < rows; ++row) f(row);
}

// A buffer for quantized rows.
class QuantizedInputs {
  public:
    // Return rows x [count, inputs] in the format that the weights need, to be filled by `quantize_row`.
    Rows reserve(const Weights& weights, const float* x, int64_t count);

    // Quantize row x [inputs] into row `row` of what was reserved last; nothing to do for float32 weights.
    void quantize_row(const Weights& weights, const float* x, int64_t row);

    // Return rows x [count, inputs] in the format that the weights need.
    Rows quantize(Team& team, const Weights& weights, const float* x, int64_t count);

  private:
    AlignedVector<int8_t> values_;
    AlignedVector<float> scales_;
    AlignedVector<int32_t> offsets_;
    AlignedVector<int16_t> wide_pairs_;
};

// Multiply the rows by the weights, into y [count, outputs].
void multiply(Team& team, const Weights& weights, const Rows& rows, int64_t count, float* y);

}  // namespace foretell
