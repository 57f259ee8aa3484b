// Types shared by the library. The reference definitions of the operations are in foretell/kernels/*.py.
#pragma once

#include <cstdint>

namespace foretell {

constexpr int kBlock = 32;  // outputs that are packed and computed together
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kStep = 4;    // consecutive inputs of one output in memory
constexpr int kKeys = 32;   // keys of an attention block
constexpr int kLine = 64;   // bytes of a cache line
constexpr int kScaleBytes = kBlock * 2;  // bfloat16 scales of an int4 block in one group
constexpr int kInt8GroupBytes = kBlock * kGroup;
constexpr int kInt4GroupBytes = kScaleBytes + kBlock * kGroup / 2;

// A matrix [outputs, inputs], `WeightsRecord` in Python. Integers are padded to blocks and groups, floats to blocks.
struct Weights {
    int64_t inputs, outputs;
    const uint8_t* packed;
    const float* scales;  // int8: one per output; those of int4 weights are interleaved with the values
    const float* bias;    // or null
    int32_t bits;         // 32 (float32), 8 or 4
    int32_t level;        // instruction set; see `foretell_best_level`
};

// The left operand of a matrix product.
struct Rows {
    const float* x;          // [rows, inputs] for float32 weights; the fields below for others
    const int8_t* values;    // [rows, groups, kGroup]
    const float* scales;     // [rows, groups]
    const int32_t* offsets;  // [rows, groups]: corrects the excess of the products of a group; see `kExcess8`
    int64_t groups;          // float32: the number of inputs
    const int16_t* wide_pairs;  // int8 with AVX2: the values in 16 bits, each four in the order 0, 2, 1, 3; or null
};

// Weights are stored with this excess to be unsigned: the instructions multiply unsigned by signed bytes.
constexpr int32_t kExcess8 = 128, kExcess4 = 8;

// Rows of one sequence and the query heads of one KV head, for attention.
struct Tile {
    const float* queries;  // of the first row, rotated and scaled
    int64_t row_stride, rows, group, dim;  // group: query heads per KV head
    const int64_t* positions;  // of the rows
    const float *keys, *values;  // of this KV head in slot 0
    int64_t slot_stride;
    const int64_t* pages;
    int64_t page_size;
    int64_t window;  // sliding window, the row itself included; 0: none
    int64_t skipped;  // keys at the start of the sequence that are masked for all rows
    // Tree nodes share the keys up to `context`; then row r sees slots tree_slots[tree_first[r] ..]. Null: a chain.
    const int64_t *tree_slots, *tree_first;
    int64_t context;
    float* out;
    int64_t out_stride;
};

// Multiply rows `first` .. `stop` by one block of outputs, into y [rows, outputs].
using Product = void (*)(
    const Weights& weights, const Rows& rows, int64_t first, int64_t stop, int64_t block, float* y);

// The operations, implemented for one instruction set.
struct Kernels {
    // Quantize one row x [inputs] into values, scales and offsets of `Rows`.
    void (*quantize)(
        const float* x, int64_t inputs, int32_t excess, int8_t* values, float* scales, int32_t* offsets);
    Product int8, int4, float32;
    void (*norm)(const float* x, const float* weight, float eps, int64_t width, float* y);
    void (*add)(float* x, const float* more, int64_t width);
    // Apply RoPE to x [dim] with a row of the table (cosines, then sines with the first half negated), then scale.
    void (*rotate)(float* x, const float* table, int64_t dim, float scale);
    void (*glu)(const float* gate_up, int64_t width, bool gelu, float* y);
    void (*attend)(const Tile& tile, float* scratch);  // `attend_scratch_floats` floats
    // Store the argmax of x [width], the first of equals, and return its softmax probability.
    float (*argmax_softmax)(const float* x, int64_t width, int64_t* at);
};

extern const Kernels portable_kernels, avx2_kernels, vnni_kernels;

// 2: AVX-512 with VNNI; 1: AVX2 and FMA; 0: neither.
const Kernels& kernels_of(int32_t level);

// Return the size of the working memory of `attend`.
inline int64_t attend_scratch_floats(int64_t queries, int64_t dim) {
    constexpr int64_t most_lanes = 16;
    return dim * (kKeys + 1) + queries * (kKeys + most_lanes + dim + 2);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t valid_outputs(const Weights& weights, int64_t block) {
    const int64_t left = weights.outputs - block * kBlock;
    return left < kBlock ? left : kBlock;
}

}  // namespace foretell
