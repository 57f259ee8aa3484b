// Finding the best of a row of scores, or drawing one of them.
#pragma once

#include <cstdint>

namespace foretell {

// Where the first of the largest is; 0 where nothing is a number.
int64_t first_largest(const float* x, int64_t width);

// How one row is drawn, as Python hands it over.
struct Draw {
    double temperature, top_p, min_p;
    int64_t top_k, key;  // what the noise of a lane is made of; see foretell/sampling/noise.py
};

// Draws from the scores x of the tokens `ids`, which are the lanes of the noise: where the winner stands, and its share
// of all that could be drawn. Where `probs` is not null, the shares of all go to their tokens in it.
float draw_among(const float* x, int64_t width, const int64_t* ids, const Draw& draw, float* probs, int64_t* at);

}  // namespace foretell
