#include "gemm.h"

#include <algorithm>

namespace foretell {
namespace {

constexpr int64_t kMinParallelGroups = 1 << 9;  // groups to quantize from which using more threads pays
constexpr int64_t kPanelBytes = 1 << 18;         // rows that stay in a core's cache while the weights stream through
constexpr int kMaxRuns = 64;

Product product_for(const Kernels& kernels, int32_t bits) {
    return bits == 8 ? kernels.int8 : bits == 4 ? kernels.int4 : kernels.float32;
}

// Return the rows that stay in the cache, a multiple of what any kernel processes at once.
int64_t panel_rows(const Weights& weights) {
    const int64_t row_bytes = weights.inputs * (weights.bits == 32 ? 4 : 1);
    return std::clamp<int64_t>(kPanelBytes / row_bytes / 60, 1, 8) * 60;
}

// Runs of blocks of decreasing length: long ones read memory faster, short ones at the end balance the threads.
struct BlockRuns {
    int64_t begins[kMaxRuns + 1];
    int64_t count = 0;

    BlockRuns(int64_t blocks, int threads) {
        begins[0] = 0;
        for (int64_t left = blocks; left > 0;) {
            const bool is_last = threads == 1 || count == kMaxRuns - 1;
            const int64_t min_length = ceil_div(blocks, kMaxRuns);  // keeps the last run short
            const int64_t length = is_last ? left : std::min(left, std::max(min_length, left / (2 * threads)));
            begins[count + 1] = begins[count] + length;
            ++count;
            left -= length;
        }
    }
};

}  // namespace

Rows QuantizedInputs::quantize(Team& team, const Weights& weights, const float* x, int64_t count) {
    if (weights.bits == 32) return Rows{x, nullptr, nullptr, nullptr, weights.inputs};
    const int64_t inputs = weights.inputs, groups = ceil_div(inputs, kGroup);
    if (int64_t(scales_.size()) < count * groups) {
        values_.resize(count * groups * kGroup);
        offsets_.resize(count * groups);
        scales_.resize(count * groups);  // last: its size says whether all three are large enough
    }
    const int32_t excess = weights.bits == 8 ? kExcess8 : kExcess4;
    const auto quantize = kernels_of(weights.level).quantize;
    const auto one = [&](int64_t row) {
        const int64_t at = row * groups;
        quantize(x + row * inputs, inputs, excess, &values_[at * kGroup], &scales_[at], &offsets_[at]);
    };
    if (count * groups >= kMinParallelGroups)
        team.each(count, one);
    else
        for (int64_t row = 0; row < count; ++row) one(row);
    return Rows{nullptr, values_.data(), scales_.data(), offsets_.data(), groups};
}

void multiply(Team& team, const Weights& weights, const Rows& rows, int64_t count, float* y) {
    const Product product = product_for(kernels_of(weights.level), weights.bits);
    const bool single_threaded = count * weights.inputs * weights.outputs < kMinParallelProducts;
    const BlockRuns runs(ceil_div(weights.outputs, kBlock), single_threaded ? 1 : team.threads());
    const int64_t panel = panel_rows(weights);
    team.each(runs.count * ceil_div(count, panel), [&](int64_t chunk) {
        const int64_t first = chunk / runs.count * panel, stop = std::min(first + panel, count);
        const int64_t run = chunk % runs.count;
        for (int64_t block = runs.begins[run]; block < runs.begins[run + 1]; ++block)
            product(weights, rows, first, stop, block, y);
    });
}

}  // namespace foretell
