// Softmax weights of a row of scores, relative to the largest and not normalized, which changes no sample.
#pragma once

#include <cstdint>
#include <vector>

namespace foretell {

// Sampling parameters of one row, `SAMPLING_ROW` in Python.
struct SamplingParams {
    double temperature, top_p, min_p;
    int64_t top_k, key;  // key of the noise; see noise.h

    bool truncates() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

// Bins of weights by their leading bits, sixteen per power of two. Weights are in [0, 1], so their bits are ordered
// like their values.
constexpr int kBinShift = 19;
constexpr int32_t kBins = (0x3F800000 >> kBinShift) + 1;

// Counts and sums of weights per bin, to find thresholds without sorting the row.
struct WeightHistogram {
    int64_t counts[kBins];
    double sums[kBins];

    void fill(const float* weights, int64_t width, float min_weight);
};

struct SoftmaxRow {
    std::vector<float> weights;
    float min_weight = 0;  // smallest weight that is kept
    // Scratch of the search for it.
    std::vector<float> candidates;
    WeightHistogram histogram;
};

// Return the index of the largest score, the first of equals; 0 if all are NaN.
int64_t argmax(const float* x, int64_t width);

// Return the sum of the weights that are at least `min_weight`.
float kept_sum(const float* weights, int64_t width, float min_weight);

// Compute the weights of the scores x with the largest score `peak`, for a temperature above 0. NaN has weight 0.
// Return false if the scores have no distribution at this temperature because `peak` is not finite or overflows: then the
// argmax has probability 1.
bool softmax_weights(const float* x, int64_t width, float peak, const SamplingParams& params, SoftmaxRow& row);

}  // namespace foretell
