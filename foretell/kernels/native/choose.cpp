// Drawing a token from a row of scores. The definition is foretell/sampling/sampling.py: `probabilities` and `draw`.
// Scores are weighed against the best one and not divided by their sum, which changes no draw.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "choose.h"
#include "pool.h"

// Compiled for several instruction sets, and chosen when the library is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define SEVERAL __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define SEVERAL
#endif

namespace foretell {

namespace {

constexpr int64_t kRun = 64;  // lanes whose noise is made together
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kFirst = 0xBF58476D1CE4E5B9u, kSecond = 0x94D049BB133111EBu;

inline __attribute__((always_inline)) uint64_t scramble(uint64_t x) {
    x = (x ^ (x >> 30)) * kFirst;
    x = (x ^ (x >> 27)) * kSecond;
    return x ^ (x >> 31);
}

// A number in (0, 1) that depends on the key and the lane alone.
inline __attribute__((always_inline)) float uniform(uint64_t key, uint64_t lane) {
    const auto bits = static_cast<int64_t>(scramble(key + lane * kGolden) & ((uint64_t{1} << 52) - 1));
    const float part = (static_cast<float>(bits) + 0.5f) * 0x1p-52f;
    return part < 1 - 0x1p-24f ? part : 1 - 0x1p-24f;
}

// e to the x, for x from -inf to 0; what is under e to the -87 is 0.
inline __attribute__((always_inline)) float exponential(float x) {
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

SEVERAL void weigh(const float* x, int64_t width, float temperature, float peak, float* weights) {
    const float top = peak / temperature;
    for (int64_t at = 0; at < width; ++at) weights[at] = exponential(x[at] / temperature - top);
}

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

// The noise of one row. Its lanes are tokens: `ids`, or, where that is null, all there are.
struct Noise {
    uint64_t key;
    const int64_t* ids;

    float at(int64_t place) const { return uniform(key, static_cast<uint64_t>(ids == nullptr ? place : ids[place])); }
};

// That of a run of places.
SEVERAL void make_parts(const Noise& noise, int64_t from, float* parts) {
    if (noise.ids == nullptr)
        for (int64_t at = 0; at < kRun; ++at) parts[at] = uniform(noise.key, static_cast<uint64_t>(from + at));
    else
        for (int64_t at = 0; at < kRun; ++at) parts[at] = uniform(noise.key, static_cast<uint64_t>(noise.ids[from + at]));
}

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
        make_parts(noise, from, parts);
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

// Weights by their leading bits, sixteen kinds between a number and its double. They are at most 1 and not negative, so
// that their bits are in the order of their values.
constexpr int kShift = 19;
constexpr int32_t kKinds = (0x3F800000 >> kShift) + 1;

inline int32_t kind(float weight) {
    int32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return bits >> kShift;
}

struct Kinds {
    int64_t counts[kKinds];
    double sums[kKinds];

    void sort_in(const float* weights, int64_t width, float least) {
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
};

// The weights of one kind that are not under `least`, the greatest first.
void gather(const float* weights, int64_t width, int32_t which, float least, std::vector<float>& found) {
    found.clear();
    for (int64_t at = 0; at < width; ++at)
        if (kind(weights[at]) == which && weights[at] >= least) found.push_back(weights[at]);
    std::sort(found.begin(), found.end(), std::greater<float>());
}

struct Room {
    std::vector<float> weights, some;
    float least = 0;  // of the weights that stay in
    Kinds kinds;
};

// The weight of the `count`th greatest; 0 where there are not as many.
float of_rank(int64_t width, int64_t count, Room& room) {
    int64_t left = count;
    for (int32_t which = kKinds - 1; which >= 0; --which) {
        if (room.kinds.counts[which] < left) {
            left -= room.kinds.counts[which];
            continue;
        }
        gather(room.weights.data(), width, which, 0, room.some);
        return room.some[left - 1];
    }
    return 0;
}

// The weight at which the greatest together first reach `share` of all that is not under `least`.
float of_share(int64_t width, double share, float least, Room& room) {
    double goal = 0, sum = 0;
    for (double each : room.kinds.sums) goal += each;
    goal *= share;
    for (int32_t which = kKinds - 1; which >= 0; --which) {
        if (sum + room.kinds.sums[which] < goal) {
            sum += room.kinds.sums[which];
            continue;
        }
        gather(room.weights.data(), width, which, least, room.some);
        for (float each : room.some)
            if ((sum += each) >= goal) return each;
    }
    return least;
}

// The least weight that stays in: min-p, then top-k, then top-p, and what is equal to the last one stays.
float least_kept(const Draw& draw, int64_t width, Room& room) {
    float least = static_cast<float>(draw.min_p);  // of the greatest, which is 1
    const bool ranked = draw.top_k > 0 && draw.top_k < width;
    if (ranked || draw.top_p < 1) room.kinds.sort_in(room.weights.data(), width, least);
    if (ranked) {
        const float rank = of_rank(width, draw.top_k, room);
        if (rank > least) {
            least = rank;
            if (draw.top_p < 1) room.kinds.sort_in(room.weights.data(), width, least);
        }
    }
    return draw.top_p < 1 ? of_share(width, draw.top_p, least, room) : least;
}

SEVERAL int64_t first_of(const float* x, int64_t width, float value) {
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

int64_t choose(const float* x, int64_t width, const int64_t* ids, const Draw& draw, Room& room) {
    const float peak = largest(x, width);
    if (!std::isfinite(peak)) return -1;
    const int64_t likeliest = first_of(x, width, peak);
    if (draw.temperature == 0) return likeliest;
    room.weights.resize(width);
    weigh(x, width, static_cast<float>(draw.temperature), peak, room.weights.data());
    const Noise noise{static_cast<uint64_t>(draw.key), ids};
    const bool restricts = draw.top_k > 0 || draw.top_p < 1 || draw.min_p > 0;
    room.least = restricts ? least_kept(draw, width, room) : 0;
    return restricts ? draw_of_some(room.weights.data(), width, noise, room.least)
                     : draw_of_all(room.weights.data(), width, noise, likeliest);
}

SEVERAL float sum_kept(const float* weights, int64_t width, float least) {
    float sums[16] = {};
    int64_t at = 0;
    for (; at + 16 <= width; at += 16)
        for (int64_t lane = 0; lane < 16; ++lane) sums[lane] += weights[at + lane] >= least ? weights[at + lane] : 0.0f;
    for (; at < width; ++at) sums[0] += weights[at] >= least ? weights[at] : 0.0f;
    float sum = 0;
    for (float each : sums) sum += each;
    return sum;
}

Room& own_room() {
    static thread_local Room room;
    return room;
}

}  // namespace

int64_t first_largest(const float* x, int64_t width) { return first_of(x, width, largest(x, width)); }

float draw_among(const float* x, int64_t width, const int64_t* ids, const Draw& draw, float* probs, int64_t* at) {
    Room& room = own_room();
    const int64_t found = choose(x, width, ids, draw, room);
    *at = std::max<int64_t>(found, 0);
    if (found < 0) return 0;  // nothing is a number: any guess will do
    const std::vector<float>& weights = room.weights;
    const float sum = sum_kept(weights.data(), width, room.least);
    for (int64_t i = 0; i < width && probs != nullptr; ++i)
        if (weights[i] >= room.least) probs[ids == nullptr ? i : ids[i]] = weights[i] / sum;
    return weights[found] / sum;
}

}  // namespace foretell

// The token of each row of x [rows, width] into ids [rows]; -1 where no score is a number to begin with.
extern "C" __attribute__((visibility("default"))) void foretell_choose(
    const float* x, int64_t rows, int64_t width, const foretell::Draw* draws, int64_t* ids, int threads) {
    foretell::Team team(rows > 1 ? threads : 1);
    team.each(rows, [&](int64_t row) {
        ids[row] = foretell::choose(x + row * width, width, nullptr, draws[row], foretell::own_room());
    });
}
