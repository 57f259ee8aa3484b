// The largest values of a row: most of it is passed over 128 values at a time.
#include "top.h"

#include <limits>

#include "entry.h"
#include "several.h"

namespace foretell {

namespace {

constexpr int64_t kRun = 128, kLanes = 16;
constexpr int kMost = 64;

typedef float Floats __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t Masks __attribute__((vector_size(kLanes * 4)));

FORETELL_INLINE bool any_above(const float* x, float least) {
    const Floats bar = least - Floats{};
    Masks found{};
    for (int64_t at = 0; at < kRun; at += kLanes) found |= *reinterpret_cast<const Floats*>(x + at) > bar;
    int32_t any = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) any |= found[lane];
    return any != 0;
}

struct Best {
    int count;
    int64_t* ids;
    float values[kMost];
    int size = 0;

    float least() const { return size < count ? -std::numeric_limits<float>::infinity() : values[size - 1]; }

    // Of equal values the first comes first, and stays.
    void offer(float value, int64_t id) {
        if (size == count && !(value > values[size - 1])) return;
        int at = size < count ? size++ : size - 1;
        for (; at > 0 && value > values[at - 1]; --at) {
            values[at] = values[at - 1];
            ids[at] = ids[at - 1];
        }
        values[at] = value;
        ids[at] = id;
    }
};

SEVERAL void find_top(const float* x, int64_t width, int count, int64_t* ids) {
    Best best{count, ids, {}};
    for (int64_t from = 0; from < width; from += kRun) {
        const int64_t stop = from + kRun < width ? from + kRun : width;
        const bool whole = stop - from == kRun;
        if (whole && best.size == count && !any_above(x + from, best.least())) continue;
        for (int64_t at = from; at < stop; ++at) best.offer(x[at], at);
    }
}

}  // namespace

void top_of_row(const float* x, int64_t width, int count, int64_t* ids) { find_top(x, width, count, ids); }

}  // namespace foretell

// The same of each row of x [rows, width] into ids [rows, count].
FORETELL_API int64_t foretell_top(const float* x, int64_t rows, int64_t width, int count, int64_t* ids) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        for (int64_t row = 0; row < rows; ++row) top_of_row(x + row * width, width, count, ids + row * count);
        return 0;
    });
}
