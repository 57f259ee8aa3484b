// Rows times matrices, shared among a team.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace foretell {

constexpr int64_t kWorthSharing = 1 << 17;  // products; below it handing work to a thread costs more than it gives

// Where rows are quantized to.
class Quantized {
  public:
    // Rows x [count, inputs] as the weights want them.
    Rows of(Team& team, const Weights& weights, const float* x, int64_t count);

  private:
    std::vector<int8_t> values_;
    std::vector<float> scales_;
    std::vector<int32_t> offsets_;
};

// Rows times the weights, into y [count, outputs].
void multiply(Team& team, const Weights& weights, const Rows& rows, int64_t count, float* y);

}  // namespace foretell
