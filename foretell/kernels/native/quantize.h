// Quantization of a row to int8; compiled once per instruction set.
#pragma once

#include <cstring>
#include <limits>

#include "kernels.h"
#include "multiversion.h"

namespace foretell {

constexpr float kMinAbsmax = 1e-30f;       // a group whose largest magnitude is at most this becomes zeros
constexpr int32_t kInfinity = 0x7f800000;  // bits of +inf: smaller ones are finite, larger ones NaN
constexpr float kRounder = 12582912.0f;    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
constexpr int32_t kRounderBits = 0x4b400000;

// Return the bits of the largest magnitude. They are ordered like the numbers, with infinity and NaN on top.
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
        const float shifted = x[i] * inverse + kRounder;
        int32_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        values[i] = int8_t(bits - kRounderBits);
        sum += bits - kRounderBits;
    }
    return sum;
}

FORETELL_INLINE void quantize_group(const float* x, int32_t excess, int8_t* values, float* scale, int32_t* offset) {
    const int32_t bits = peak_bits(x);
    float peak;
    std::memcpy(&peak, &bits, sizeof peak);
    if (bits >= kInfinity || peak <= kMinAbsmax) {
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
