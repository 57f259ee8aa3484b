// Drawing a token from a row of scores. The definition is foretell/sampling/sampling.py: `probabilities` and `draw`.
#include <algorithm>
#include <cmath>
#include <vector>

#include "choose.h"
#include "entry.h"
#include "noise.h"
#include "pool.h"
#include "several.h"

namespace foretell {

namespace {

constexpr int64_t kRun = 64;  // lanes whose noise is made together

// The race of one lane: the greatest wins, and each wins as often as its share of the weights says.
inline float race(float weight, float part) {
    return weight / static_cast<float>(-std::log1p(-static_cast<double>(part)));
}

struct Winner {
    float best = -1;
    int64_t at = -1;

    void meet(float value, int64_t place) {
        if (value > best || (value == best && place < at)) {
            best = value;
            at = place;
        }
    }
};

SEVERAL void make_run(const Noise& noise, int64_t from, float* parts) { make_parts(noise, from, kRun, parts); }

// Which of a run's lanes may win: a race is at most the weight over its number, since -log(1 - u) is at least u.
SEVERAL bool may_win(const float* weights, const float* parts, float best) {
    int32_t any = 0;
    for (int64_t at = 0; at < kRun; ++at) any |= weights[at] * 1.0001f >= best * parts[at];
    return any != 0;
}

int64_t draw_of_all(const float* weights, int64_t width, const Noise& noise, int64_t likeliest) {
    Winner winner;
    winner.meet(race(weights[likeliest], noise.at(likeliest)), likeliest);
    float parts[kRun];
    int64_t from = 0;
    for (; from + kRun <= width; from += kRun) {
        make_run(noise, from, parts);
        if (!may_win(weights + from, parts, winner.best)) continue;
        for (int64_t at = 0; at < kRun; ++at)
            if (weights[from + at] * 1.0001f >= winner.best * parts[at])
                winner.meet(race(weights[from + at], parts[at]), from + at);
    }
    for (; from < width; ++from) winner.meet(race(weights[from], noise.at(from)), from);
    return winner.at;
}

int64_t draw_of_some(const float* weights, int64_t width, const Noise& noise, float least) {
    Winner winner;
    for (int64_t at = 0; at < width; ++at)
        if (weights[at] >= least) winner.meet(race(weights[at], noise.at(at)), at);
    return winner.at;
}

struct Choice {
    int64_t at;
    bool sampled;  // else it is the first largest score, taken with certainty
};

Choice choose(const float* x, int64_t width, const int64_t* ids, const Draw& draw, Weighed& row) {
    const int64_t largest = first_largest(x, width);
    if (draw.temperature == 0 || !weigh(x, width, x[largest], draw, row)) return {largest, false};
    const Noise noise{static_cast<uint64_t>(draw.key), ids};
    return {draw.restricts() ? draw_of_some(row.weights.data(), width, noise, row.least)
                             : draw_of_all(row.weights.data(), width, noise, largest),
            true};
}

}  // namespace

float draw_among(const float* x, int64_t width, const int64_t* ids, const Draw& draw, float* probs, int64_t* at) {
    Weighed& row = scratch<Weighed>();
    const Choice choice = choose(x, width, ids, draw, row);
    *at = choice.at;
    if (!choice.sampled) {
        if (probs != nullptr) probs[ids == nullptr ? choice.at : ids[choice.at]] = 1;
        return 1;
    }
    const std::vector<float>& weights = row.weights;
    const float sum = sum_kept(weights.data(), width, row.least);
    for (int64_t i = 0; i < width && probs != nullptr; ++i)
        if (weights[i] >= row.least) probs[ids == nullptr ? i : ids[i]] = weights[i] / sum;
    return weights[choice.at] / sum;
}

}  // namespace foretell

// The token of each row of x [rows, width] into ids [rows].
FORETELL_API int64_t foretell_choose(
    const float* x, int64_t rows, int64_t width, const foretell::Draw* draws, int64_t* ids, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        Team team(rows > 1 ? threads : 1);
        team.each(rows, [&](int64_t row) {
            ids[row] = choose(x + row * width, width, nullptr, draws[row], scratch<Weighed>()).at;
        });
        return 0;
    });
}
