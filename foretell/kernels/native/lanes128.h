// Four floats at a time: what the compiler makes of it on any processor (SSE2, NEON).
#pragma once

#include <cstdint>
#include <cstring>

namespace foretell {
namespace {

struct Lanes {
    typedef float V __attribute__((vector_size(16)));
    typedef int32_t Whole __attribute__((vector_size(16)));
    static constexpr int kCount = 4;
    static constexpr int kRows = 6;    // of a product in floats: with two vectors each, as many sums as registers hold
    static constexpr int kAcross = 2;  // vectors of a value that attention adds up at once

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

    // The first `count` lanes; the others are zero.
    static V load_some(const float* at, int64_t count) {
        V x = zero();
        std::memcpy(&x, at, (count < kCount ? count : kCount) * sizeof *at);
        return x;
    }
    static void store_some(float* at, V x, int64_t count) {
        std::memcpy(at, &x, (count < kCount ? count : kCount) * sizeof *at);
    }

    // Lanes from `begin` to `end` of x; the others are `rest`.
    static V keep(V x, int64_t begin, int64_t end, V rest) {
        const Whole lane{0, 1, 2, 3}, from = Whole{} + int32_t(begin), to = Whole{} + int32_t(end);
        return pick((lane >= from) & (lane < to), x, rest);
    }

    // 2 to the power of whole numbers between -126 and 127.
    static V power_of_two(V whole) { return (V)((__builtin_convertvector(whole, Whole) + 127) << 23); }

    // Lane j of out[i * stride ..] is rows[j][i].
    static void transpose(const float* const* rows, int64_t at, float* out, int64_t stride) {
        for (int i = 0; i < kCount; ++i)
            for (int j = 0; j < kCount; ++j) out[i * stride + j] = rows[j][at + i];
    }

  private:
    static V pick(Whole mask, V a, V b) { return (V)(((Whole)a & mask) | ((Whole)b & ~mask)); }
};

}  // namespace
}  // namespace foretell
