// Row-wise operations; compiled once per instruction set, after `Lanes`.
#pragma once

#include <cstdint>

#include "quantize.h"

namespace foretell {
namespace {

using V = Lanes::V;

// Call f(at, count) for each full vector and for the remainder.
template <class F>
FORETELL_INLINE void by_lanes(int64_t width, F f) {
    int64_t at = 0;
    for (; at + Lanes::kCount <= width; at += Lanes::kCount) f(at, int64_t(Lanes::kCount));
    if (at < width) f(at, width - at);
}

// Return exp(x): exactly 1 for 0, about 1e-38 for very low x.
FORETELL_INLINE V exponential(V x) {
    const V rounder = Lanes::all(kRounder);
    x = Lanes::min(Lanes::max(x, Lanes::all(-87.0f)), Lanes::all(88.0f));
    const V whole = Lanes::sub(Lanes::fma(x, Lanes::all(1.44269504f), rounder), rounder);
    const V rest = Lanes::fma(whole, Lanes::all(2.12194440e-4f), Lanes::fma(whole, Lanes::all(-0.693359375f), x));
    V y = Lanes::all(1.9875691500e-4f);
    y = Lanes::fma(y, rest, Lanes::all(1.3981999507e-3f));
    y = Lanes::fma(y, rest, Lanes::all(8.3334519073e-3f));
    y = Lanes::fma(y, rest, Lanes::all(4.1665795894e-2f));
    y = Lanes::fma(y, rest, Lanes::all(1.6666665459e-1f));
    y = Lanes::fma(y, rest, Lanes::all(5.0000001201e-1f));
    y = Lanes::add(Lanes::fma(y, Lanes::mul(rest, rest), rest), Lanes::all(1.0f));
    return Lanes::mul(y, Lanes::power_of_two(whole));
}

[[maybe_unused]] void quantize(const float* x, int64_t inputs, int32_t excess, int8_t* values, float* scales, int32_t* offsets) {
    quantize_row(x, inputs, excess, values, scales, offsets);
}

void norm(const float* x, const float* weight, float eps, int64_t width, float* y) {
    V squares = Lanes::zero();
    by_lanes(width, [&](int64_t at, int64_t count) {
        const V part = Lanes::load_some(x + at, count);
        squares = Lanes::fma(part, part, squares);
    });
    const V inverse = Lanes::all(1.0f / __builtin_sqrtf(Lanes::sum(squares) / float(width) + eps));
    by_lanes(width, [&](int64_t at, int64_t count) {
        const V part = Lanes::mul(Lanes::load_some(x + at, count), inverse);
        Lanes::store_some(y + at, Lanes::mul(part, Lanes::load_some(weight + at, count)), count);
    });
}

void add(float* x, const float* more, int64_t width) {
    by_lanes(width, [&](int64_t at, int64_t count) {
        Lanes::store_some(x + at, Lanes::add(Lanes::load_some(x + at, count), Lanes::load_some(more + at, count)), count);
    });
}

void rotate(float* x, const float* table, int64_t dim, float scale) {
    const int64_t half = dim / 2;
    const float *const cosines = table, *const sines = table + dim;
    const V factor = Lanes::all(scale);
    by_lanes(half, [&](int64_t at, int64_t count) {
        const auto some = [count](const float* from) { return Lanes::load_some(from, count); };
        const V a = some(x + at), b = some(x + half + at);
        const V rotated_a = Lanes::add(Lanes::mul(a, some(cosines + at)), Lanes::mul(b, some(sines + at)));
        const V rotated_b = Lanes::add(Lanes::mul(b, some(cosines + half + at)), Lanes::mul(a, some(sines + half + at)));
        Lanes::store_some(x + at, Lanes::mul(rotated_a, factor), count);
        Lanes::store_some(x + half + at, Lanes::mul(rotated_b, factor), count);
    });
}

// Return x / (1 + e^-t): SiLU with t = x; with another t the tanh approximation of GELU.
template <bool Gelu>
FORETELL_INLINE V activated(V x) {
    V t = x;
    if (Gelu) {
        const V cube = Lanes::mul(Lanes::mul(x, x), x);
        t = Lanes::mul(Lanes::all(1.5957691216f), Lanes::fma(cube, Lanes::all(0.044715f), x));
    }
    return Lanes::div(x, Lanes::add(Lanes::all(1.0f), exponential(Lanes::sub(Lanes::zero(), t))));
}

template <bool Gelu>
FORETELL_INLINE void glu_as(const float* gate_up, int64_t width, float* y) {
    by_lanes(width, [&](int64_t at, int64_t count) {
        const V gate = activated<Gelu>(Lanes::load_some(gate_up + at, count));
        Lanes::store_some(y + at, Lanes::mul(gate, Lanes::load_some(gate_up + width + at, count)), count);
    });
}

float argmax_softmax(const float* x, int64_t width, int64_t* at) {
    const int64_t whole = width / Lanes::kCount * Lanes::kCount;
    V high = Lanes::all(x[0]);
    for (int64_t i = 0; i < whole; i += Lanes::kCount) high = Lanes::max(high, Lanes::load(x + i));
    float peak = Lanes::peak(high);
    for (int64_t i = whole; i < width; ++i) peak = x[i] > peak ? x[i] : peak;
    for (*at = 0; *at < width - 1 && x[*at] != peak;) ++*at;
    V sums = Lanes::zero();
    for (int64_t i = 0; i < whole; i += Lanes::kCount)
        sums = Lanes::add(sums, exponential(Lanes::sub(Lanes::load(x + i), Lanes::all(peak))));
    float sum = Lanes::sum(sums);
    if (whole < width) {
        const V rest = exponential(Lanes::sub(Lanes::load_some(x + whole, width - whole), Lanes::all(peak)));
        sum += Lanes::sum(Lanes::keep(rest, 0, width - whole, Lanes::zero()));
    }
    return 1.0f / sum;
}

void glu(const float* gate_up, int64_t width, bool gelu, float* y) {
    gelu ? glu_as<true>(gate_up, width, y) : glu_as<false>(gate_up, width, y);
}

}  // namespace
}  // namespace foretell
