// Sampling a token from a row of scores.
#pragma once

#include <cstdint>

#include "softmax.h"

namespace foretell {

// Sample from the scores x of the tokens `ids`, which are the lanes of the noise. Store the index and return the
// probability of the sample. If `probs` is not null, store the probability of every token in it.
float sample_token(const float* x, int64_t width, const int64_t* ids, const SamplingParams& params, float* probs,
                   int64_t* index);

}  // namespace foretell
