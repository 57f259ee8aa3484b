// Finding the best of a row of scores.
#pragma once

#include <cstdint>

namespace foretell {

// Where the first of the largest is; 0 where nothing is a number.
int64_t first_largest(const float* x, int64_t width);

}  // namespace foretell
