// Top-k of a row. Runs of 128 values that are all below the current k-th largest are skipped.
#include "topk.h"

#include <limits>

#include "entry.h"
#include "multiversion.h"

namespace foretell {

namespace {

constexpr int64_t kRun = 128, kLanes = 16;
constexpr int kMaxTopK = 64;

typedef float Floats __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t Masks __attribute__((vector_size(kLanes * 4)));

FORETELL_INLINE bool any_above(const float* x, float threshold) {
    const Floats thresholds = threshold - Floats{};
    Masks found{};
    for (int64_t at = 0; at < kRun; at += kLanes) found |= *reinterpret_cast<const Floats*>(x + at) > thresholds;
    int32_t any = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) any |= found[lane];
    return any != 0;
}

struct TopK {
    int count;
    int64_t* ids;
    float values[kMaxTopK];
    int size = 0;

    float threshold() const { return size < count ? -std::numeric_limits<float>::infinity() : values[size - 1]; }

    // Insert a value; equal values keep the order of their indices.
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

MULTIVERSION void find_top(const float* x, int64_t width, int count, int64_t* ids) {
    TopK topk{count, ids, {}};
    for (int64_t from = 0; from < width; from += kRun) {
        const int64_t stop = from + kRun < width ? from + kRun : width;
        const bool full = stop - from == kRun;
        if (full && topk.size == count && !any_above(x + from, topk.threshold())) continue;
        for (int64_t at = from; at < stop; ++at) topk.offer(x[at], at);
    }
}

}  // namespace

void topk_of_row(const float* x, int64_t width, int count, int64_t* ids) { find_top(x, width, count, ids); }

}  // namespace foretell

// Find the top `count` of each row of x [rows, width], into ids [rows, count].
FORETELL_API int64_t foretell_topk(const float* x, int64_t rows, int64_t width, int count, int64_t* ids) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        for (int64_t row = 0; row < rows; ++row) topk_of_row(x + row * width, width, count, ids + row * count);
        return 0;
    });
}
