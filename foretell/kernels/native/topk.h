// Top-k of a row of scores.
#pragma once

#include <cstdint>

namespace foretell {

// Store the indices of the `count` largest scores, best first and the first of equals first, in ids [count]. `count` is
// at most 64 and at most `width`. No score may be NaN.
void topk_of_row(const float* x, int64_t width, int count, int64_t* ids);

}  // namespace foretell
