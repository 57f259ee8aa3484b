// Finding the best of a row of scores, or drawing one.
#pragma once

#include <cstdint>

namespace foretell {

// How one row is drawn, as Python hands it over.
struct Draw {
    double temperature, top_p, min_p;
    int64_t top_k, key;  // what the noise of a lane is made of; see foretell/sampling/noise.py
};

// Draws by a temperature above 0: where in the row the drawn one stands, and how far it was ahead, as its share of all
// races. `lanes` [width] say whose noise each place has; null: its own. Where no score is a number it is the first, at 0.
float draw_with_odds(const float* x, int64_t width, const Draw& draw, const int64_t* lanes, int64_t* at);

// Where the first of the largest is; 0 where nothing is a number.
int64_t first_largest(const float* x, int64_t width);

}  // namespace foretell
