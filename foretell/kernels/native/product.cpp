#include "product.h"

#include <algorithm>

namespace foretell {
namespace {

constexpr int64_t kWorthSharingGroups = 1 << 9;  // to quantize
constexpr int64_t kPanelBytes = 1 << 18;         // of rows that stay in a core's own cache while the weights pass by
constexpr int kMostRuns = 64;

Product product_of(const Kernels& kernels, int32_t bits) {
    return bits == 8 ? kernels.int8 : bits == 4 ? kernels.int4 : kernels.float32;
}

// Rows that stay in the cache; a multiple of what any kernel takes at once.
int64_t panel_of(const Weights& weights) {
    const int64_t row_bytes = weights.inputs * (weights.bits == 32 ? 4 : 1);
    return std::clamp<int64_t>(kPanelBytes / row_bytes / 60, 1, 8) * 60;
}

// Runs of blocks, shorter and shorter: long ones read memory faster, short ones at the end leave nobody waiting.
struct Runs {
    int64_t begins[kMostRuns + 1];
    int64_t count = 0;

    Runs(int64_t blocks, int threads) {
        begins[0] = 0;
        for (int64_t left = blocks; left > 0;) {
            const bool is_last = threads == 1 || count == kMostRuns - 1;
            const int64_t least = up(blocks, kMostRuns);  // or many threads would leave most of it to the last run
            const int64_t now = is_last ? left : std::min(left, std::max(least, left / (2 * threads)));
            begins[count + 1] = begins[count] + now;
            ++count;
            left -= now;
        }
    }
};

}  // namespace

Rows Quantized::of(Team& team, const Weights& weights, const float* x, int64_t count) {
    if (weights.bits == 32) return Rows{x, nullptr, nullptr, nullptr, weights.inputs};
    const int64_t inputs = weights.inputs, groups = up(inputs, kGroup);
    if (int64_t(scales_.size()) < count * groups) {
        values_.resize(count * groups * kGroup);
        offsets_.resize(count * groups);
        scales_.resize(count * groups);  // last: its size tells whether all three are large enough
    }
    const int32_t excess = weights.bits == 8 ? kExcess8 : kExcess4;
    const auto quantize = kernels_of(weights.level).quantize;
    const auto one = [&](int64_t row) {
        const int64_t at = row * groups;
        quantize(x + row * inputs, inputs, excess, &values_[at * kGroup], &scales_[at], &offsets_[at]);
    };
    if (count * groups >= kWorthSharingGroups)
        team.each(count, one);
    else
        for (int64_t row = 0; row < count; ++row) one(row);
    return Rows{nullptr, values_.data(), scales_.data(), offsets_.data(), groups};
}

void multiply(Team& team, const Weights& weights, const Rows& rows, int64_t count, float* y) {
    const Product product = product_of(kernels_of(weights.level), weights.bits);
    const bool alone = count * weights.inputs * weights.outputs < kWorthSharing;
    const Runs runs(up(weights.outputs, kBlock), alone ? 1 : team.threads());
    const int64_t panel = panel_of(weights);
    team.each(runs.count * up(count, panel), [&](int64_t piece) {
        const int64_t first = piece / runs.count * panel, stop = std::min(first + panel, count);
        const int64_t run = piece % runs.count;
        for (int64_t block = runs.begins[run]; block < runs.begins[run + 1]; ++block)
            product(weights, rows, first, stop, block, y);
    });
}

}  // namespace foretell
