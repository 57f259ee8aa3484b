// What a row of scores is drawn from: weights against the best one, not divided by their sum, which changes no draw.
#pragma once

#include <cstdint>
#include <vector>

namespace foretell {

// How one row is drawn, as Python hands it over.
struct Draw {
    double temperature, top_p, min_p;
    int64_t top_k, key;  // what the noise of a lane is made of; see noise.h

    bool restricts() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

// Weights by their leading bits, sixteen kinds between a number and its double. They are at most 1 and not negative, so
// that their bits are in the order of their values.
constexpr int kShift = 19;
constexpr int32_t kKinds = (0x3F800000 >> kShift) + 1;

struct Kinds {
    int64_t counts[kKinds];
    double sums[kKinds];

    void sort_in(const float* weights, int64_t width, float least);
};

struct Weighed {
    std::vector<float> weights;
    float least = 0;  // of the weights that stay in
    // What finding it takes.
    std::vector<float> some;
    Kinds kinds;
};

// Where the first of the largest is; 0 where nothing is a number.
int64_t first_largest(const float* x, int64_t width);

// The sum of the weights that are not under `least`.
float sum_kept(const float* weights, int64_t width, float least);

// Weigh the scores x with the largest score `peak`, for a temperature above 0. A NaN weighs 0. Return false where the
// scores have no distribution at this temperature, because `peak` is not finite or overflows: then the first largest
// score is taken, with certainty.
bool weigh(const float* x, int64_t width, float peak, const Draw& draw, Weighed& row);

}  // namespace foretell
