// The top-k of a row in its exponential race (Gumbel-top-k), with each score as a share of all scores. The definition
// is in foretell/draft/heads/sampling.py. With temperature 0 there is no race: the most likely tokens.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "entry.h"
#include "noise.h"
#include "pool.h"
#include "multiversion.h"
#include "topk.h"
#include "softmax.h"

namespace foretell {

namespace {

// Weights of a row that does not sample: plain softmax at temperature 1.
constexpr SamplingParams kGreedy{1.0, 1.0, 0.0, 0, 0};

// Return -log(1 - uniform) for uniform in (0, 1). A first-order term corrects the rounding of 1 - uniform.
FORETELL_INLINE float neg_log1p(float uniform) {
    const float rest = 1.0f - uniform, lost = uniform - (1.0f - rest);
    int32_t bits;
    std::memcpy(&bits, &rest, sizeof bits);
    const int32_t power = (bits - 0x3F3504F3) >> 23;  // rest = 2^power times a number in [sqrt(1/2), sqrt(2)]
    bits -= power * (1 << 23);
    float near;
    std::memcpy(&near, &bits, sizeof near);
    const float x = near - 1.0f, square = x * x, exponent = static_cast<float>(power);
    float sum = 7.0376836292e-2f;
    sum = sum * x - 1.1514610310e-1f;
    sum = sum * x + 1.1676998740e-1f;
    sum = sum * x - 1.2420140846e-1f;
    sum = sum * x + 1.4249322787e-1f;
    sum = sum * x - 1.6668057665e-1f;
    sum = sum * x + 2.0000714765e-1f;
    sum = sum * x - 2.4999993993e-1f;
    sum = sum * x + 3.3333331174e-1f;
    const float log = (x + (sum * x * square - exponent * 2.12194440e-4f - 0.5f * square)) + exponent * 0.693359375f;
    return lost / rest - log;
}

// Compute the race score of each token; 0 for tokens that are not kept.
MULTIVERSION void race_scores(const SoftmaxRow& row, int64_t width, const Noise& noise, float* scores) {
    const float* const weights = row.weights.data();
    const float min_weight = row.min_weight;
    make_uniforms(noise, 0, width, scores);
    for (int64_t at = 0; at < width; ++at)
        scores[at] = (weights[at] >= min_weight ? weights[at] : 0.0f) / neg_log1p(scores[at]);
}

// Results for one row: indices and probabilities.
struct TopK {
    int count;
    int64_t* at;
    float* probs;
};

struct RaceScores {
    std::vector<float> floats;
};

// Results for scores without a distribution: the argmax with probability 1 if finite, then the first others with 0.
void fill_degenerate(const TopK& topk, int64_t argmax_index, float peak) {
    std::iota(topk.at, topk.at + topk.count, 0);
    std::fill(topk.probs, topk.probs + topk.count, 0.0f);
    if (argmax_index < topk.count) topk.at[argmax_index] = 0;
    topk.at[0] = argmax_index;
    topk.probs[0] = std::isfinite(peak) ? 1.0f : 0.0f;
}

void race_topk_row(const float* x, int64_t width, const int64_t* ids, const SamplingParams& params, const TopK& topk) {
    const int64_t argmax_index = argmax(x, width);
    const bool samples = params.temperature > 0;
    SoftmaxRow& row = scratch<SoftmaxRow>();
    if (!softmax_weights(x, width, x[argmax_index], samples ? params : kGreedy, row))
        return fill_degenerate(topk, argmax_index, x[argmax_index]);
    std::vector<float>& scores = scratch<RaceScores>().floats;
    if (samples) {
        scores.resize(width);
        race_scores(row, width, Noise{static_cast<uint64_t>(params.key), ids}, scores.data());
    }
    const float* const values = samples ? scores.data() : row.weights.data();
    topk_of_row(samples ? values : x, width, topk.count, topk.at);
    const float sum = kept_sum(values, width, 0);
    for (int i = 0; i < topk.count; ++i) topk.probs[i] = values[topk.at[i]] / sum;
}

}  // namespace
}  // namespace foretell

// Find the top `count` tokens of each row of x [rows, width], the scores of the tokens `ids`, in its race: the tokens
// [rows, count], best first, and their probabilities. count is at most 64 and at most width.
FORETELL_API int64_t foretell_race_topk(
    const float* x, int64_t rows, int64_t width, const foretell::SamplingParams* params, const int64_t* ids, int count,
    int64_t* tokens, float* probs, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        Team team(rows > 1 ? threads : 1);
        team.each(rows, [&](int64_t row) {
            int64_t* const found = tokens + row * count;
            race_topk_row(x + row * width, width, ids, params[row], {count, found, probs + row * count});
            for (int i = 0; i < count; ++i) found[i] = ids[found[i]];
        });
        return 0;
    });
}
