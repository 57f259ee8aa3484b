// What the parts of the library share. The definitions of the operations are in foretell/kernels/quantized.py.
#pragma once

#include <cstdint>

namespace foretell {

constexpr int kBlock = 32;  // outputs that are packed, and worked on, together
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kStep = 4;    // inputs of one output that lie side by side
constexpr int kLine = 64;   // bytes of a cache line
constexpr int kScaleBytes = kBlock * 2;  // of a block's 4-bit weights in one group
constexpr int kInt8GroupBytes = kBlock * kGroup;
constexpr int kInt4GroupBytes = kScaleBytes + kBlock * kGroup / 2;

// A matrix [outputs, inputs] as Python hands it over; everything is padded to whole blocks and groups.
struct Weights {
    int64_t inputs, outputs;
    const uint8_t* packed;
    const float* scales;  // of each output; null for 4-bit weights, whose scales lie between them
    const float* bias;    // or null
    int32_t bits;
    int32_t level;        // which instructions to use; see `best_level`
};

// Rows that were quantized.
struct Rows {
    const int8_t* values;    // [rows, groups, kGroup]
    const float* scales;     // [rows, groups]
    const int32_t* offsets;  // [rows, groups]: what a group's products are too high by, negative; see `kExcess`
    int64_t groups;
};

// Weights are stored higher than they are, to be unsigned: the instructions multiply unsigned by signed bytes.
constexpr int32_t kExcess8 = 128, kExcess4 = 8;

// Rows `first` .. `stop` times one block of outputs, into y [rows, outputs].
using Product = void (*)(
    const Weights& weights, const Rows& rows, int64_t first, int64_t stop, int64_t block, float* y);

// One row x [inputs] into values, scales and offsets, as `Rows` has them.
using Quantize = void (*)(
    const float* x, int64_t inputs, int32_t excess, int8_t* values, float* scales, int32_t* offsets);

struct Kernels {
    Quantize quantize;
    Product int8, int4;
};

extern const Kernels plain_kernels, avx2_kernels, vnni_kernels;

inline int64_t valid_outputs(const Weights& weights, int64_t block) {
    const int64_t left = weights.outputs - block * kBlock;
    return left < kBlock ? left : kBlock;
}

}  // namespace foretell
