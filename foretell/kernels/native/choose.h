// Drawing one of a row of scores.
#pragma once

#include <cstdint>

#include "weigh.h"

namespace foretell {

// Draws from the scores x of the tokens `ids`, which are the lanes of the noise: where the winner stands, and its share
// of all that could be drawn. Where `probs` is not null, the shares of all go to their tokens in it.
float draw_among(const float* x, int64_t width, const int64_t* ids, const Draw& draw, float* probs, int64_t* at);

}  // namespace foretell
