// SIMD lanes of four floats by compiler vector extensions (SSE2, NEON).
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace foretell {
namespace {

struct Lanes {
    typedef float V __attribute__((vector_size(16)));
    typedef int32_t Ints __attribute__((vector_size(16)));
    static constexpr int kCount = 4;
    static constexpr int kRows = 6;    // rows of a float32 product: with two vectors each, the sums fill the registers
    static constexpr int kAcross = 2;  // vectors of a value that attention accumulates at once

    static V zero() { return V{0, 0, 0, 0}; }
    static V all(float x) { return V{x, x, x, x}; }
    static V load(const float* at) {
        V x;
        std::memcpy(&x, at, sizeof x);
        return x;
    }
    static void store(float* at, V x) { std::memcpy(at, &x, sizeof x); }
    static V add(V a, V b) { return a + b; }
    static V sub(V a, V b) { return a - b; }
    static V mul(V a, V b) { return a * b; }
    static V div(V a, V b) { return a / b; }
    static V max(V a, V b) { return pick(a > b, a, b); }
    static V min(V a, V b) { return pick(a < b, a, b); }

    static V fma(V a, V b, V c) {
#if defined(__FP_FAST_FMAF)
        V x;
        for (int i = 0; i < kCount; ++i) x[i] = __builtin_fmaf(a[i], b[i], c[i]);
        return x;
#else
        return a * b + c;
#endif
    }

    static float sum(V x) { return (x[0] + x[2]) + (x[1] + x[3]); }

    static float peak(V x) {
        const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
        return a > b ? a : b;
    }

    static V load(const Bfloat16* at) {
        Ints bits;
        for (int i = 0; i < kCount; ++i) bits[i] = int32_t(uint32_t(at[i].bits) << 16);
        return (V)bits;
    }
    static V load(const Float16* at) {
        V x;
        for (int i = 0; i < kCount; ++i) x[i] = from_half(at[i]);
        return x;
    }
    static V load(const int8_t* at) { return V{float(at[0]), float(at[1]), float(at[2]), float(at[3])}; }
    static void store(Float16* at, V x) {
        for (int i = 0; i < kCount; ++i) at[i] = to_half(x[i]);
    }

    // Load the first `count` lanes; the others are zero.
    static V load_some(const float* at, int64_t count) {
        V x = zero();
        std::memcpy(&x, at, (count < kCount ? count : kCount) * sizeof *at);
        return x;
    }
    static void store_some(float* at, V x, int64_t count) {
        std::memcpy(at, &x, (count < kCount ? count : kCount) * sizeof *at);
    }

    // Return lanes `begin` to `end` of x; the others are `rest`.
    static V keep(V x, int64_t begin, int64_t end, V rest) {
        const Ints lane{0, 1, 2, 3}, from = Ints{} + int32_t(begin), to = Ints{} + int32_t(end);
        return pick((lane >= from) & (lane < to), x, rest);
    }

    // Return 2^whole for integers from -126 to 127.
    static V power_of_two(V whole) { return (V)((__builtin_convertvector(whole, Ints) + 127) << 23); }

    // Return 2^n for x = 1.5 * 2^23 + n, which rounds to an integer; n from -126 to 127.
    static V power_of_rounded(V x) { return (V)(((Ints)x << 23) + (127 << 23)); }

    // Store rows[j][at + i] as lane j of out[i * stride ..].
    template <class T>
    static void transpose(const T* const* rows, int64_t at, float* out, int64_t stride) {
        for (int j = 0; j < kCount; ++j) {
            const V row = load(rows[j] + at);
            for (int i = 0; i < kCount; ++i) out[i * stride + j] = row[i];
        }
    }

  private:
    template <class To, class From>
    static To bits_of(From x) {
        To bits;
        static_assert(sizeof bits == sizeof x, "the same number of bits");
        std::memcpy(&bits, &x, sizeof bits);
        return bits;
    }

    static float from_half(Float16 half) {
        const uint32_t sign = uint32_t(half.bits & 0x8000) << 16, magnitude = uint32_t(half.bits & 0x7fff) << 13;
        if (magnitude >= 0x0f800000) return bits_of<float>(sign | 0x7f800000 | magnitude);  // infinity or NaN
        return bits_of<float>(bits_of<uint32_t>(bits_of<float>(magnitude) * 0x1p112f) | sign);
    }

    // Round to nearest, ties to even, as the instructions do.
    static Float16 to_half(float x) {
        const uint32_t all = bits_of<uint32_t>(x), sign = all >> 16 & 0x8000;
        uint32_t bits = all & 0x7fffffff;
        if (bits >= 0x47800000) {  // 2^16 and more
            bits = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
        } else if (bits < 0x38800000) {  // below 2^-14: a sum with 0.5 rounds to a multiple of 2^-24
            bits = bits_of<uint32_t>(bits_of<float>(bits) + 0.5f) - 0x3f000000;
        } else {
            bits = (bits + 0xc8000fff + (bits >> 13 & 1)) >> 13;
        }
        return Float16{uint16_t(sign | bits)};
    }

    static V pick(Ints mask, V a, V b) { return (V)(((Ints)a & mask) | ((Ints)b & ~mask)); }
};

}  // namespace
}  // namespace foretell
