// Counter-based random numbers (splitmix64) by key and lane. The definition is foretell/sampling/noise.py.
#pragma once

#include <cstdint>

#include "multiversion.h"

namespace foretell {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kFirst = 0xBF58476D1CE4E5B9u, kSecond = 0x94D049BB133111EBu;

FORETELL_INLINE uint64_t scramble(uint64_t x) {
    x = (x ^ (x >> 30)) * kFirst;
    x = (x ^ (x >> 27)) * kSecond;
    return x ^ (x >> 31);
}

// Return a number in (0, 1) that depends only on key and lane.
FORETELL_INLINE float uniform(uint64_t key, uint64_t lane) {
    const auto bits = static_cast<int64_t>(scramble(key + lane * kGolden) & ((uint64_t{1} << 52) - 1));
    const float value = (static_cast<float>(bits) + 0.5f) * 0x1p-52f;
    return value < 1 - 0x1p-24f ? value : 1 - 0x1p-24f;
}

// The noise of one row. Its lanes are the tokens `ids`; null: all tokens of the vocabulary.
struct Noise {
    uint64_t key;
    const int64_t* ids;

    float at(int64_t index) const { return uniform(key, static_cast<uint64_t>(ids == nullptr ? index : ids[index])); }
};

// Generate the noise of `count` lanes.
FORETELL_INLINE void make_uniforms(const Noise& noise, int64_t from, int64_t count, float* uniforms) {
    const int64_t* const ids = noise.ids;
    if (ids == nullptr)
        for (int64_t at = 0; at < count; ++at) uniforms[at] = uniform(noise.key, static_cast<uint64_t>(from + at));
    else
        for (int64_t at = 0; at < count; ++at) uniforms[at] = uniform(noise.key, static_cast<uint64_t>(ids[from + at]));
}

}  // namespace foretell
