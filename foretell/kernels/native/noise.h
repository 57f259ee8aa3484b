// Random numbers by key and lane. The definition is foretell/sampling/noise.py.
#pragma once

#include <cstdint>

#include "several.h"

namespace foretell {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kFirst = 0xBF58476D1CE4E5B9u, kSecond = 0x94D049BB133111EBu;

FORETELL_INLINE uint64_t scramble(uint64_t x) {
    x = (x ^ (x >> 30)) * kFirst;
    x = (x ^ (x >> 27)) * kSecond;
    return x ^ (x >> 31);
}

// A number in (0, 1) that depends on the key and the lane alone.
FORETELL_INLINE float uniform(uint64_t key, uint64_t lane) {
    const auto bits = static_cast<int64_t>(scramble(key + lane * kGolden) & ((uint64_t{1} << 52) - 1));
    const float part = (static_cast<float>(bits) + 0.5f) * 0x1p-52f;
    return part < 1 - 0x1p-24f ? part : 1 - 0x1p-24f;
}

// The noise of one row. Its lanes are tokens: `ids`, or, where that is null, all there are.
struct Noise {
    uint64_t key;
    const int64_t* ids;

    float at(int64_t place) const { return uniform(key, static_cast<uint64_t>(ids == nullptr ? place : ids[place])); }
};

// That of `count` places.
FORETELL_INLINE void make_parts(const Noise& noise, int64_t from, int64_t count, float* parts) {
    const int64_t* const ids = noise.ids;
    if (ids == nullptr)
        for (int64_t at = 0; at < count; ++at) parts[at] = uniform(noise.key, static_cast<uint64_t>(from + at));
    else
        for (int64_t at = 0; at < count; ++at) parts[at] = uniform(noise.key, static_cast<uint64_t>(ids[from + at]));
}

}  // namespace foretell
