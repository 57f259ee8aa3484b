// The largest of a row of scores.
#pragma once

#include <cstdint>

namespace foretell {

// Where the `count` largest are, best first, into ids [count]; of equals the first. `count` is at most 64 and at most
// `width`, and nothing is NaN.
void top_of_row(const float* x, int64_t width, int count, int64_t* ids);

}  // namespace foretell
