// The definition is foretell/sampling/sampling.py: `probabilities`.
#include "softmax.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "multiversion.h"

namespace foretell {

namespace {

// Return exp(x) for x in [-inf, 0]; 0 below exp(-87).
FORETELL_INLINE float exponential(float x) {
    const float low = x > -87.0f ? x : -87.0f;
    const float shifted = low * 1.44269504f + 12582912.0f;  // rounds to an integer in the low bits
    const float whole = shifted - 12582912.0f;
    const float rest = (low - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4B400000 + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return x > -87.0f ? sum * scale : 0.0f;
}

MULTIVERSION float largest(const float* x, int64_t width) {
    float best[16];
    for (float& each : best) each = -INFINITY;
    int64_t at = 0;
    for (; at + 16 <= width; at += 16)
        for (int64_t lane = 0; lane < 16; ++lane) best[lane] = x[at + lane] > best[lane] ? x[at + lane] : best[lane];
    for (; at < width; ++at) best[0] = x[at] > best[0] ? x[at] : best[0];
    float found = best[0];
    for (float each : best) found = each > found ? each : found;
    return found;
}

// Bounds of the temperature, as in `probabilities`: smaller ones would overflow the scores.
constexpr double kMinTemperature = 1e-6, kMaxTemperature = std::numeric_limits<float>::max();

MULTIVERSION void exponentiate(const float* x, int64_t width, float temperature, float peak, float* weights) {
    const float top = peak / temperature;
    for (int64_t at = 0; at < width; ++at) weights[at] = exponential(x[at] / temperature - top);
}

inline int32_t bin_of(float weight) {
    int32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return bits >> kBinShift;
}

// Collect the weights of one bin that are at least `min_weight`, in descending order.
void gather_bin(const float* weights, int64_t width, int32_t bin, float min_weight, std::vector<float>& found) {
    found.clear();
    for (int64_t at = 0; at < width; ++at)
        if (bin_of(weights[at]) == bin && weights[at] >= min_weight) found.push_back(weights[at]);
    std::sort(found.begin(), found.end(), std::greater<float>());
}

// Return the `count`-th largest weight; 0 if there are fewer.
float kth_weight(int64_t width, int64_t count, SoftmaxRow& row) {
    int64_t left = count;
    for (int32_t bin = kBins - 1; bin >= 0; --bin) {
        if (row.histogram.counts[bin] < left) {
            left -= row.histogram.counts[bin];
            continue;
        }
        gather_bin(row.weights.data(), width, bin, 0, row.candidates);
        return row.candidates[left - 1];
    }
    return 0;
}

// Return the weight at which the largest weights first sum to `top_p` of all that are at least `min_weight`.
float top_p_weight(int64_t width, double top_p, float min_weight, SoftmaxRow& row) {
    double goal = 0, sum = 0;
    for (double each : row.histogram.sums) goal += each;
    goal *= top_p;
    for (int32_t bin = kBins - 1; bin >= 0; --bin) {
        if (sum + row.histogram.sums[bin] < goal) {
            sum += row.histogram.sums[bin];
            continue;
        }
        gather_bin(row.weights.data(), width, bin, min_weight, row.candidates);
        for (float each : row.candidates)
            if ((sum += each) >= goal) return each;
    }
    return min_weight;
}

// Return the smallest weight that is kept by min-p, then top-k, then top-p. Ties are kept.
float min_kept_weight(const SamplingParams& params, int64_t width, SoftmaxRow& row) {
    float min_weight = static_cast<float>(params.min_p);  // relative to the largest weight, which is 1
    const bool has_top_k = params.top_k > 0 && params.top_k < width;
    if (has_top_k || params.top_p < 1) row.histogram.fill(row.weights.data(), width, min_weight);
    if (has_top_k) {
        const float threshold = kth_weight(width, params.top_k, row);
        if (threshold > min_weight) {
            min_weight = threshold;
            if (params.top_p < 1) row.histogram.fill(row.weights.data(), width, min_weight);
        }
    }
    return params.top_p < 1 ? top_p_weight(width, params.top_p, min_weight, row) : min_weight;
}

MULTIVERSION float sum_at_least(const float* weights, int64_t width, float min_weight) {
    double sums[16] = {};  // double: thousands of small weights next to a large one
    int64_t at = 0;
    for (; at + 16 <= width; at += 16)
        for (int64_t lane = 0; lane < 16; ++lane)
            sums[lane] += weights[at + lane] >= min_weight ? weights[at + lane] : 0.0f;
    for (; at < width; ++at) sums[0] += weights[at] >= min_weight ? weights[at] : 0.0f;
    double sum = 0;
    for (double each : sums) sum += each;
    return static_cast<float>(sum);
}

MULTIVERSION int64_t first_equal(const float* x, int64_t width, float value) {
    constexpr int64_t kRun = 64;
    int64_t from = 0;
    for (; from + kRun <= width; from += kRun) {
        int32_t any = 0;
        for (int64_t at = 0; at < kRun; ++at) any |= x[from + at] == value;
        if (any) break;
    }
    for (; from < width; ++from)
        if (x[from] == value) return from;
    return 0;
}

}  // namespace

void WeightHistogram::fill(const float* weights, int64_t width, float min_weight) {
    std::fill(counts, counts + kBins, 0);
    std::fill(sums, sums + kBins, 0.0);
    for (int64_t at = 0; at < width; ++at) {
        const float weight = weights[at];
        if (weight < min_weight || weight == 0) continue;
        const int32_t bin = bin_of(weight);
        counts[bin] += 1;
        sums[bin] += weight;
    }
}

int64_t argmax(const float* x, int64_t width) {
    const float value = largest(x, width);
    return value == -INFINITY ? 0 : first_equal(x, width, value);  // NaN counts as -inf
}

float kept_sum(const float* weights, int64_t width, float min_weight) {
    return sum_at_least(weights, width, min_weight);
}

bool softmax_weights(const float* x, int64_t width, float peak, const SamplingParams& params, SoftmaxRow& row) {
    const auto temperature = static_cast<float>(std::clamp(params.temperature, kMinTemperature, kMaxTemperature));
    if (!std::isfinite(peak / temperature)) return false;
    row.weights.resize(width);
    exponentiate(x, width, temperature, peak, row.weights.data());
    row.min_weight = params.truncates() ? min_kept_weight(params, width, row) : 0;
    return true;
}

}  // namespace foretell
