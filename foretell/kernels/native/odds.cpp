// The best of a row of scores in the race of its noise, and how far each is ahead, as shares of all. The definition is
// foretell/draft/heads/sampling.py: `_odds`. Where nothing is drawn there is no race: the likeliest, and how likely they are.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "entry.h"
#include "noise.h"
#include "pool.h"
#include "several.h"
#include "top.h"
#include "weigh.h"

namespace foretell {

namespace {

constexpr Draw kAsTheyAre{1.0, 1.0, 0.0, 0, 0};

// -log(1 - part), for part in (0, 1). 1 - part is rounded; the slope of the logarithm there makes that good.
FORETELL_INLINE float waiting(float part) {
    const float rest = 1.0f - part, lost = part - (1.0f - rest);
    int32_t bits;
    std::memcpy(&bits, &rest, sizeof bits);
    const int32_t power = (bits - 0x3F3504F3) >> 23;  // rest is two to it times a number from sqrt(1/2) to sqrt(2)
    bits -= power * (1 << 23);
    float near;
    std::memcpy(&near, &bits, sizeof near);
    const float x = near - 1.0f, square = x * x, whole = static_cast<float>(power);
    float sum = 7.0376836292e-2f;
    sum = sum * x - 1.1514610310e-1f;
    sum = sum * x + 1.1676998740e-1f;
    sum = sum * x - 1.2420140846e-1f;
    sum = sum * x + 1.4249322787e-1f;
    sum = sum * x - 1.6668057665e-1f;
    sum = sum * x + 2.0000714765e-1f;
    sum = sum * x - 2.4999993993e-1f;
    sum = sum * x + 3.3333331174e-1f;
    const float log = (x + (sum * x * square - whole * 2.12194440e-4f - 0.5f * square)) + whole * 0.693359375f;
    return lost / rest - log;
}

// How far each place is in the race; what does not stay in is nowhere.
SEVERAL void race_all(const Weighed& row, int64_t width, const Noise& noise, float* ahead) {
    const float* const weights = row.weights.data();
    const float least = row.least;
    make_parts(noise, 0, width, ahead);
    for (int64_t at = 0; at < width; ++at) ahead[at] = (weights[at] >= least ? weights[at] : 0.0f) / waiting(ahead[at]);
}

// The best of a row, `count` of them: where they are, and their shares.
struct Best {
    int count;
    int64_t* at;
    float* shares;
};

struct Ahead {
    std::vector<float> floats;
};

// Of scores without a distribution: the largest for certain where it is finite, and the first others with no share.
void take_first(const Best& best, int64_t largest, float peak) {
    std::iota(best.at, best.at + best.count, 0);
    std::fill(best.shares, best.shares + best.count, 0.0f);
    if (largest < best.count) best.at[largest] = 0;
    best.at[0] = largest;
    best.shares[0] = std::isfinite(peak) ? 1.0f : 0.0f;
}

void race(const float* x, int64_t width, const int64_t* ids, const Draw& draw, const Best& best) {
    const int64_t largest = first_largest(x, width);
    const bool races = draw.temperature > 0;
    Weighed& row = scratch<Weighed>();
    if (!weigh(x, width, x[largest], races ? draw : kAsTheyAre, row)) return take_first(best, largest, x[largest]);
    std::vector<float>& ahead = scratch<Ahead>().floats;
    if (races) {
        ahead.resize(width);
        race_all(row, width, Noise{static_cast<uint64_t>(draw.key), ids}, ahead.data());
    }
    const float* const odds = races ? ahead.data() : row.weights.data();
    top_of_row(races ? odds : x, width, best.count, best.at);
    const float sum = sum_kept(odds, width, 0);
    for (int i = 0; i < best.count; ++i) best.shares[i] = odds[best.at[i]] / sum;
}

}  // namespace
}  // namespace foretell

// Of each row of x [rows, width], the scores of the tokens `ids`, the `count` best in its race: the tokens
// [rows, count], best first, and their shares. count is at most 64 and at most width.
FORETELL_API int64_t foretell_odds(
    const float* x, int64_t rows, int64_t width, const foretell::Draw* draws, const int64_t* ids, int count,
    int64_t* tokens, float* shares, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        Team team(rows > 1 ? threads : 1);
        team.each(rows, [&](int64_t row) {
            int64_t* const found = tokens + row * count;
            race(x + row * width, width, ids, draws[row], {count, found, shares + row * count});
            for (int i = 0; i < count; ++i) found[i] = ids[found[i]];
        });
        return 0;
    });
}
