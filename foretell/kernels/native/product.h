// Rows times matrices, shared among a team.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace foretell {

constexpr int64_t kWorthSharing = 1 << 17;  // products; below it handing work to a thread costs more than it gives

constexpr int64_t kWorthSharingFloats = 1 << 12;  // of rows to be normed, turned or gated
constexpr int64_t kTileQueries = 24;              // that share a block of keys while it is at hand

// f(row) for each row of so many floats, shared where it pays.
template <class F>
void by_rows(Team& team, int64_t rows, int64_t width, const F& f) {
    if (rows * width < kWorthSharingFloats || team.threads() == 1) {
        for (int64_t row = 0; row < rows; ++row) f(row);
        return;
    }
    const int64_t some = up(rows, 4 * team.threads());
    team.each(up(rows, some), [&](int64_t chunk) {
        for (int64_t row = chunk * some; row < std::min((chunk + 1) * some, rows); ++row) f(row);
    });
}

// Rows of a text that attend together: enough to share blocks of keys, few enough to keep every thread busy.
inline int64_t tile_rows(const Team& team, int64_t rows, int64_t heads, int64_t kv_heads) {
    int64_t most = std::max<int64_t>(1, kTileQueries / (heads / kv_heads));
    while (most > 2 && team.threads() > 1 && rows * kv_heads / most < 2 * team.threads()) most = up(most, 2);
    return most;
}

// What one piece of attention works in.
struct AttendRoom {
    std::vector<float> floats;
    std::vector<int64_t> firsts;
};

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
