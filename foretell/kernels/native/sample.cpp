// Token sampling by the exponential race (Gumbel-max). The definition is foretell/sampling/sampling.py: `probabilities`
// and `sample_from_probs`.
#include <algorithm>
#include <cmath>
#include <vector>

#include "sample.h"
#include "entry.h"
#include "noise.h"
#include "pool.h"
#include "multiversion.h"

namespace foretell {

namespace {

constexpr int64_t kRun = 64;  // lanes whose noise is generated together

// The score of one lane: the largest wins, and each lane wins with a probability proportional to its weight.
inline float race_score(float weight, float uniform) {
    return weight / static_cast<float>(-std::log1p(-static_cast<double>(uniform)));
}

struct RaceWinner {
    float best = -1;
    int64_t at = -1;

    void offer(float value, int64_t index) {
        if (value > best || (value == best && index < at)) {
            best = value;
            at = index;
        }
    }
};

MULTIVERSION void make_uniform_run(const Noise& noise, int64_t from, float* uniforms) {
    make_uniforms(noise, from, kRun, uniforms);
}

// Return whether a lane of a run may win: its score is at most weight / u, since -log(1 - u) is at least u.
MULTIVERSION bool may_win(const float* weights, const float* uniforms, float best) {
    int32_t any = 0;
    for (int64_t at = 0; at < kRun; ++at) any |= weights[at] * 1.0001f >= best * uniforms[at];
    return any != 0;
}

int64_t sample_full(const float* weights, int64_t width, const Noise& noise, int64_t argmax_index) {
    RaceWinner winner;
    winner.offer(race_score(weights[argmax_index], noise.at(argmax_index)), argmax_index);
    float uniforms[kRun];
    int64_t from = 0;
    for (; from + kRun <= width; from += kRun) {
        make_uniform_run(noise, from, uniforms);
        if (!may_win(weights + from, uniforms, winner.best)) continue;
        for (int64_t at = 0; at < kRun; ++at)
            if (weights[from + at] * 1.0001f >= winner.best * uniforms[at])
                winner.offer(race_score(weights[from + at], uniforms[at]), from + at);
    }
    for (; from < width; ++from) winner.offer(race_score(weights[from], noise.at(from)), from);
    return winner.at;
}

int64_t sample_truncated(const float* weights, int64_t width, const Noise& noise, float min_weight) {
    RaceWinner winner;
    for (int64_t at = 0; at < width; ++at)
        if (weights[at] >= min_weight) winner.offer(race_score(weights[at], noise.at(at)), at);
    return winner.at;
}

struct Sampled {
    int64_t at;
    bool sampled;  // false: the argmax, with probability 1
};

Sampled sample_row(const float* x, int64_t width, const int64_t* ids, const SamplingParams& params, SoftmaxRow& row) {
    const int64_t argmax_index = argmax(x, width);
    if (params.temperature == 0 || !softmax_weights(x, width, x[argmax_index], params, row))
        return {argmax_index, false};
    const Noise noise{static_cast<uint64_t>(params.key), ids};
    return {params.truncates() ? sample_truncated(row.weights.data(), width, noise, row.min_weight)
                             : sample_full(row.weights.data(), width, noise, argmax_index),
            true};
}

}  // namespace

float sample_token(const float* x, int64_t width, const int64_t* ids, const SamplingParams& params, float* probs,
                   int64_t* index) {
    SoftmaxRow& row = scratch<SoftmaxRow>();
    const Sampled choice = sample_row(x, width, ids, params, row);
    *index = choice.at;
    if (!choice.sampled) {
        if (probs != nullptr) probs[ids == nullptr ? choice.at : ids[choice.at]] = 1;
        return 1;
    }
    const std::vector<float>& weights = row.weights;
    const float sum = kept_sum(weights.data(), width, row.min_weight);
    for (int64_t i = 0; i < width && probs != nullptr; ++i)
        if (weights[i] >= row.min_weight) probs[ids == nullptr ? i : ids[i]] = weights[i] / sum;
    return weights[choice.at] / sum;
}

}  // namespace foretell

// Sample a token for each row of x [rows, width] into ids [rows].
FORETELL_API int64_t foretell_sample(
    const float* x, int64_t rows, int64_t width, const foretell::SamplingParams* params, int64_t* ids, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        Team team(rows > 1 ? threads : 1);
        team.each(rows, [&](int64_t row) {
            ids[row] = sample_row(x + row * width, width, nullptr, params[row], scratch<SoftmaxRow>()).at;
        });
        return 0;
    });
}
