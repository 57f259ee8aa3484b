#include "gemm.h"

#include <algorithm>

namespace foretell {
namespace {

constexpr int64_t kPanelBytes = 1 << 18;  // rows that stay in a core's cache while the weights stream through

Product product_for(const Kernels& kernels, int32_t bits) {
    return bits == 8 ? kernels.int8 : bits == 4 ? kernels.int4 : kernels.float32;
}

// Return the rows that stay in the cache, a multiple of what any kernel processes at once.
int64_t panel_rows(const Weights& weights) {
    const int64_t row_bytes = weights.inputs * (weights.bits == 32 ? 4 : 1);
    return std::clamp<int64_t>(kPanelBytes / row_bytes / 60, 1, 8) * 60;
}

// Return whether the kernel of these weights reads `Rows::wide_pairs`.
bool needs_wide_pairs(const Weights& weights) { return weights.bits == 8 && weights.level == 1; }

void widen_pairs(const int8_t* values, int64_t count, int16_t* wide) {
    for (int64_t i = 0; i < count; i += kStep) {
        wide[i] = values[i], wide[i + 1] = values[i + 2];
        wide[i + 2] = values[i + 1], wide[i + 3] = values[i + 3];
    }
}

}  // namespace

Rows QuantizedInputs::reserve(const Weights& weights, const float* x, int64_t count) {
    if (weights.bits == 32) return Rows{x, nullptr, nullptr, nullptr, weights.inputs, nullptr};
    const int64_t groups = ceil_div(weights.inputs, kGroup);
    if (int64_t(scales_.size()) < count * groups) {
        values_.resize(count * groups * kGroup);
        offsets_.resize(count * groups);
        scales_.resize(count * groups);  // last: its size says whether all three are large enough
    }
    const bool widens = needs_wide_pairs(weights);
    if (widens && int64_t(wide_pairs_.size()) < count * groups * kGroup) wide_pairs_.resize(count * groups * kGroup);
    return Rows{nullptr, values_.data(), scales_.data(), offsets_.data(), groups, widens ? wide_pairs_.data() : nullptr};
}

void QuantizedInputs::quantize_row(const Weights& weights, const float* x, int64_t row) {
    if (weights.bits == 32) return;
    const int64_t at = row * ceil_div(weights.inputs, kGroup);
    const int32_t excess = weights.bits == 8 ? kExcess8 : kExcess4;
    kernels_of(weights.level)
        .quantize(x, weights.inputs, excess, &values_[at * kGroup], &scales_[at], &offsets_[at]);
    if (needs_wide_pairs(weights))
        widen_pairs(&values_[at * kGroup], ceil_div(weights.inputs, kGroup) * kGroup, &wide_pairs_[at * kGroup]);
}

Rows QuantizedInputs::quantize(Team& team, const Weights& weights, const float* x, int64_t count) {
    const Rows rows = reserve(weights, x, count);
    if (weights.bits != 32)
        by_rows(team, count, weights.inputs, [&](int64_t row) { quantize_row(weights, x + row * weights.inputs, row); });
    return rows;
}

void multiply(Team& team, const Weights& weights, const Rows& rows, int64_t count, float* y) {
    const Product product = product_for(kernels_of(weights.level), weights.bits);
    const int64_t blocks = ceil_div(weights.outputs, kBlock), panel = panel_rows(weights);
    const auto one = [&](int64_t item) {
        const int64_t first = item / blocks * panel, stop = std::min(first + panel, count);
        product(weights, rows, first, stop, item % blocks, y);
    };
    const int64_t items = blocks * ceil_div(count, panel);
    if (count * weights.inputs * weights.outputs >= kMinParallelProducts)
        team.split(items, one);
    else
        for (int64_t item = 0; item < items; ++item) one(item);
}

}  // namespace foretell
