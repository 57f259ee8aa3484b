// Conversion of new keys and values to the data type of the KV cache. The definition is foretell/kernels/store.py.
#pragma once

#include <cstring>

#include "rowwise.h"

namespace foretell {
namespace {

// Round to nearest, ties to even.
FORETELL_INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

void store_float16(const float* x, int64_t dim, Float16* out) {
    by_lanes(dim, [&](int64_t at, int64_t count) {
        if (count == Lanes::kCount) return Lanes::store(out + at, Lanes::load(x + at));
        Float16 some[Lanes::kCount];
        Lanes::store(some, Lanes::load_some(x + at, count));
        std::memcpy(out + at, some, count * sizeof *some);
    });
}

// Quantize with one scale, which is stored after the values.
void store_int8(const float* x, int64_t dim, uint8_t* out) {
    float highest = 0.0f;
    for (int64_t i = 0; i < dim; ++i) highest = __builtin_fabsf(x[i]) > highest ? __builtin_fabsf(x[i]) : highest;
    const float scale = highest / 127.0f, inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    int8_t* const values = reinterpret_cast<int8_t*>(out);
    for (int64_t i = 0; i < dim; ++i) {
        const float rounded = x[i] * inverse + kRounder;  // to an integer, ties to even
        values[i] = int8_t(rounded - kRounder);
    }
    std::memcpy(out + dim, &scale, sizeof scale);
}

void store_kv(const float* x, int64_t dim, int32_t type, uint8_t* out) {
    if (type == kFloat32) {
        std::memcpy(out, x, dim * sizeof *x);
    } else if (type == kBfloat16) {
        uint16_t* const bits = reinterpret_cast<uint16_t*>(out);
        for (int64_t i = 0; i < dim; ++i) bits[i] = to_bfloat16(x[i]);
    } else if (type == kFloat16) {
        store_float16(x, dim, reinterpret_cast<Float16*>(out));
    } else {
        store_int8(x, dim, out);
    }
}

}  // namespace
}  // namespace foretell
