// The largest values of a row: most of it is passed over 128 values at a time.
#include <cstdint>
#include <limits>

namespace {

constexpr int64_t kRun = 128, kLanes = 16;
constexpr int kMost = 64;

typedef float Floats __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t Masks __attribute__((vector_size(kLanes * 4)));

inline __attribute__((always_inline)) bool any_above(const float* x, float least) {
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

// Compiled for several instruction sets, and chosen when the library is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void top_of_row(const float* x, int64_t width, int count, int64_t* ids) {
    Best best{count, ids, {}};
    for (int64_t from = 0; from < width; from += kRun) {
        const int64_t stop = from + kRun < width ? from + kRun : width;
        const bool whole = stop - from == kRun;
        if (whole && best.size == count && !any_above(x + from, best.least())) continue;
        for (int64_t at = from; at < stop; ++at) best.offer(x[at], at);
    }
}

}  // namespace

// The ids of the `count` largest of each row of x [rows, width], best first, into ids [rows, count].
// count is at most 64 and at most width.
extern "C" __attribute__((visibility("default"))) void foretell_top(
    const float* x, int64_t rows, int64_t width, int count, int64_t* ids) {
    for (int64_t row = 0; row < rows; ++row) top_of_row(x + row * width, width, count, ids + row * count);
}
