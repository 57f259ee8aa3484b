// The definition is foretell/sampling/sampling.py: `probabilities`.
#include "weigh.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "several.h"

namespace foretell {

namespace {

// e to the x, for x from -inf to 0; what is under e to the -87 is 0.
FORETELL_INLINE float exponential(float x) {
    const float low = x > -87.0f ? x : -87.0f;
    const float turns = low * 1.44269504f + 12582912.0f;  // rounds to a whole number, which its last bits hold
    const float whole = turns - 12582912.0f;
    const float rest = (low - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &turns, sizeof bits);
    bits = (bits - 0x4B400000 + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return x > -87.0f ? sum * scale : 0.0f;
}

SEVERAL float largest(const float* x, int64_t width) {
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

// The temperatures at which scores are divided, as in `probabilities`: smaller ones would overflow.
constexpr double kLeastTemperature = 1e-6, kMostTemperature = std::numeric_limits<float>::max();

SEVERAL void weigh_all(const float* x, int64_t width, float temperature, float peak, float* weights) {
    const float top = peak / temperature;
    for (int64_t at = 0; at < width; ++at) weights[at] = exponential(x[at] / temperature - top);
}

inline int32_t kind(float weight) {
    int32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return bits >> kShift;
}

// The weights of one kind that are not under `least`, the greatest first.
void gather(const float* weights, int64_t width, int32_t which, float least, std::vector<float>& found) {
    found.clear();
    for (int64_t at = 0; at < width; ++at)
        if (kind(weights[at]) == which && weights[at] >= least) found.push_back(weights[at]);
    std::sort(found.begin(), found.end(), std::greater<float>());
}

// The weight of the `count`th greatest; 0 where there are not as many.
float of_rank(int64_t width, int64_t count, Weighed& row) {
    int64_t left = count;
    for (int32_t which = kKinds - 1; which >= 0; --which) {
        if (row.kinds.counts[which] < left) {
            left -= row.kinds.counts[which];
            continue;
        }
        gather(row.weights.data(), width, which, 0, row.some);
        return row.some[left - 1];
    }
    return 0;
}

// The weight at which the greatest together first reach `share` of all that is not under `least`.
float of_share(int64_t width, double share, float least, Weighed& row) {
    double goal = 0, sum = 0;
    for (double each : row.kinds.sums) goal += each;
    goal *= share;
    for (int32_t which = kKinds - 1; which >= 0; --which) {
        if (sum + row.kinds.sums[which] < goal) {
            sum += row.kinds.sums[which];
            continue;
        }
        gather(row.weights.data(), width, which, least, row.some);
        for (float each : row.some)
            if ((sum += each) >= goal) return each;
    }
    return least;
}

// The least weight that stays in: min-p, then top-k, then top-p, and what is equal to the last one stays.
float least_kept(const Draw& draw, int64_t width, Weighed& row) {
    float least = static_cast<float>(draw.min_p);  // of the greatest, which is 1
    const bool ranked = draw.top_k > 0 && draw.top_k < width;
    if (ranked || draw.top_p < 1) row.kinds.sort_in(row.weights.data(), width, least);
    if (ranked) {
        const float rank = of_rank(width, draw.top_k, row);
        if (rank > least) {
            least = rank;
            if (draw.top_p < 1) row.kinds.sort_in(row.weights.data(), width, least);
        }
    }
    return draw.top_p < 1 ? of_share(width, draw.top_p, least, row) : least;
}

SEVERAL float sum_of(const float* weights, int64_t width, float least) {
    double sums[16] = {};  // thousands of small weights beside a large one
    int64_t at = 0;
    for (; at + 16 <= width; at += 16)
        for (int64_t lane = 0; lane < 16; ++lane) sums[lane] += weights[at + lane] >= least ? weights[at + lane] : 0.0f;
    for (; at < width; ++at) sums[0] += weights[at] >= least ? weights[at] : 0.0f;
    double sum = 0;
    for (double each : sums) sum += each;
    return static_cast<float>(sum);
}

SEVERAL int64_t first_of(const float* x, int64_t width, float value) {
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

void Kinds::sort_in(const float* weights, int64_t width, float least) {
    std::fill(counts, counts + kKinds, 0);
    std::fill(sums, sums + kKinds, 0.0);
    for (int64_t at = 0; at < width; ++at) {
        const float weight = weights[at];
        if (weight < least || weight == 0) continue;
        const int32_t which = kind(weight);
        counts[which] += 1;
        sums[which] += weight;
    }
}

int64_t first_largest(const float* x, int64_t width) {
    const float value = largest(x, width);
    return value == -INFINITY ? 0 : first_of(x, width, value);  // NaN counts as -inf
}

float sum_kept(const float* weights, int64_t width, float least) { return sum_of(weights, width, least); }

bool weigh(const float* x, int64_t width, float peak, const Draw& draw, Weighed& row) {
    const auto temperature = static_cast<float>(std::clamp(draw.temperature, kLeastTemperature, kMostTemperature));
    if (!std::isfinite(peak / temperature)) return false;
    row.weights.resize(width);
    weigh_all(x, width, temperature, peak, row.weights.data());
    row.least = draw.restricts() ? least_kept(draw, width, row) : 0;
    return true;
}

}  // namespace foretell
