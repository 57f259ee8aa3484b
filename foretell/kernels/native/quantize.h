// How a row becomes integers; compiled once for each set of instructions.
#pragma once

#include <cstring>
#include <limits>

#include "kernels.h"
#include "several.h"

namespace foretell {

constexpr float kLeastPeak = 1e-30f;       // a group no larger than this is taken for zeros
constexpr int32_t kInfinity = 0x7f800000;  // the bits of a float: below it are numbers, above it none
constexpr float kRounder = 12582912.0f;    // 1.5 * 2^23: added, it leaves the nearest integer in the low bits
constexpr int32_t kRounderBits = 0x4b400000;

// The largest magnitude, as bits: they are ordered as the numbers are, with infinity and NaN above all.
FORETELL_INLINE int32_t peak_bits(const float* x) {
    int32_t peak = 0;
    for (int i = 0; i < kGroup; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        peak = bits > peak ? bits : peak;
    }
    return peak;
}

FORETELL_INLINE int32_t round_group(const float* x, float inverse, int8_t* values) {
    int32_t sum = 0;
    for (int i = 0; i < kGroup; ++i) {
        const float rounded = x[i] * inverse + kRounder;
        int32_t bits;
        std::memcpy(&bits, &rounded, sizeof bits);
        values[i] = int8_t(bits - kRounderBits);
        sum += bits - kRounderBits;
    }
    return sum;
}

FORETELL_INLINE void quantize_group(const float* x, int32_t excess, int8_t* values, float* scale, int32_t* offset) {
    const int32_t bits = peak_bits(x);
    float peak;
    std::memcpy(&peak, &bits, sizeof peak);
    if (bits >= kInfinity || peak <= kLeastPeak) {
        std::memset(values, 0, kGroup);
        *scale = bits >= kInfinity ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
        *offset = 0;
    } else {
        *offset = -excess * round_group(x, 127.0f / peak, values);
        *scale = peak / 127.0f;
    }
}

FORETELL_INLINE void quantize_row(
    const float* x, int64_t inputs, int32_t excess, int8_t* values, float* scales, int32_t* offsets) {
    const int64_t whole = inputs / kGroup;
    for (int64_t g = 0; g < whole; ++g)
        quantize_group(x + g * kGroup, excess, values + g * kGroup, scales + g, offsets + g);
    if (whole * kGroup < inputs) {
        float last[kGroup] = {};
        std::memcpy(last, x + whole * kGroup, (inputs - whole * kGroup) * sizeof *x);
        quantize_group(last, excess, values + whole * kGroup, scales + whole, offsets + whole);
    }
}

}  // namespace foretell
