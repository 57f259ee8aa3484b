// What the parts of the library share. The definitions of the operations are in foretell/kernels/*.py.
#pragma once

#include <cstdint>

namespace foretell {

constexpr int kBlock = 32;  // outputs that are packed, and worked on, together
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kStep = 4;    // inputs of one output that lie side by side
constexpr int kKeys = 32;   // that attention works on together
constexpr int kLine = 64;   // bytes of a cache line
constexpr int kScaleBytes = kBlock * 2;  // of a block's 4-bit weights in one group
constexpr int kInt8GroupBytes = kBlock * kGroup;
constexpr int kInt4GroupBytes = kScaleBytes + kBlock * kGroup / 2;

// A matrix [outputs, inputs] as Python hands it over; integers are padded to whole blocks and groups, floats to blocks.
struct Weights {
    int64_t inputs, outputs;
    const uint8_t* packed;
    const float* scales;  // of each output of 8-bit weights; those of 4-bit weights lie between them
    const float* bias;    // or null
    int32_t bits;         // 32 for floats, 8 or 4
    int32_t level;        // which instructions to use; see `foretell_best_level`
};

// What a product reads.
struct Rows {
    const float* x;          // [rows, inputs], for weights in floats; for others, those below
    const int8_t* values;    // [rows, groups, kGroup]
    const float* scales;     // [rows, groups]
    const int32_t* offsets;  // [rows, groups]: what a group's products are too high by, negative; see `kExcess8`
    int64_t groups;          // for floats, the inputs
};

// Weights are stored higher than they are, to be unsigned: the instructions multiply unsigned by signed bytes.
constexpr int32_t kExcess8 = 128, kExcess4 = 8;

// Some rows of one sequence and the query heads that share one key head, for attention.
struct Tile {
    const float* queries;  // of the first row; turned and scaled
    int64_t row_stride, rows, share, dim;
    const int64_t* positions;  // of the rows
    const float *keys, *values;  // of this key head in slot 0
    int64_t slot_stride;
    const int64_t* pages;
    int64_t page_size;
    int64_t window;  // a row sees so many keys, itself included; 0: all before it
    int64_t hidden;  // keys at the text's beginning that no row sees
    // Nodes of a tree share the keys up to `shared`; behind them row r sees slots own[own_first[r] ..]. Null: a chain.
    const int64_t *own, *own_first;
    int64_t shared;
    float* out;
    int64_t out_stride;
};

// Rows `first` .. `stop` times one block of outputs, into y [rows, outputs].
using Product = void (*)(
    const Weights& weights, const Rows& rows, int64_t first, int64_t stop, int64_t block, float* y);

// One set of instructions' ways to do each operation.
struct Kernels {
    // One row x [inputs] into values, scales and offsets, as `Rows` has them.
    void (*quantize)(
        const float* x, int64_t inputs, int32_t excess, int8_t* values, float* scales, int32_t* offsets);
    Product int8, int4, float32;
    void (*norm)(const float* x, const float* weight, float eps, int64_t width, float* y);
    void (*add)(float* x, const float* more, int64_t width);
    // x [dim] by its position's row of the table: cosines, then sines with the first half negated; then scaled.
    void (*turn)(float* x, const float* table, int64_t dim, float scale);
    void (*gate)(const float* gate_up, int64_t width, bool gelu, float* y);
    void (*attend)(const Tile& tile, float* room);  // of `attend_room` floats
    // Where the first of the largest of x [width] is, and its share of all: what softmax makes of it.
    float (*best)(const float* x, int64_t width, int64_t* at);
};

extern const Kernels plain_kernels, avx2_kernels, vnni_kernels;

// 2: AVX-512 with VNNI; 1: AVX2 and FMA; 0: neither.
const Kernels& kernels_of(int32_t level);

// What attention wants to work in.
inline int64_t attend_room(int64_t queries, int64_t dim) {
    constexpr int64_t most_lanes = 16;
    return dim * (kKeys + 1) + queries * (kKeys + most_lanes + dim + 2);
}

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t valid_outputs(const Weights& weights, int64_t block) {
    const int64_t left = weights.outputs - block * kBlock;
    return left < kBlock ? left : kBlock;
}

}  // namespace foretell
