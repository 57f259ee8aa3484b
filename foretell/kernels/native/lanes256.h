// SIMD lanes of eight floats with AVX2 and FMA.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace foretell {
namespace {

struct Lanes {
    using V = __m256;
    static constexpr int kCount = 8;
    static constexpr int kRows = 6;    // rows of a float32 product: with two vectors each, the sums fill the registers
    static constexpr int kAcross = 2;  // vectors of a value that attention accumulates at once

    static V zero() { return _mm256_setzero_ps(); }
    static V all(float x) { return _mm256_set1_ps(x); }
    static V load(const float* at) { return _mm256_loadu_ps(at); }
    static void store(float* at, V x) { _mm256_storeu_ps(at, x); }
    static V add(V a, V b) { return _mm256_add_ps(a, b); }
    static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
    static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
    static V div(V a, V b) { return _mm256_div_ps(a, b); }
    static V max(V a, V b) { return _mm256_max_ps(a, b); }
    static V min(V a, V b) { return _mm256_min_ps(a, b); }
    static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }

    static float sum(V x) {
        const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
    }

    static float peak(V x) {
        const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
    }

    static V load(const Bfloat16* at) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    static V load(const Float16* at) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    }
    static V load(const int8_t* at) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
    }
    static void store(Float16* at, V x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }

    // Load the first `count` lanes; the others are zero.
    static V load_some(const float* at, int64_t count) {
        return count >= kCount ? load(at) : _mm256_maskload_ps(at, between(0, count));
    }
    static void store_some(float* at, V x, int64_t count) {
        if (count >= kCount) return store(at, x);
        _mm256_maskstore_ps(at, between(0, count), x);
    }

    // Return lanes `begin` to `end` of x; the others are `rest`.
    static V keep(V x, int64_t begin, int64_t end, V rest) {
        return _mm256_blendv_ps(rest, x, _mm256_castsi256_ps(between(begin, end)));
    }

    // Return 2^whole for integers from -126 to 127.
    static V power_of_two(V whole) {
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
    }

    // Return 2^n for x = 1.5 * 2^23 + n, which rounds to an integer; n from -126 to 127.
    static V power_of_rounded(V x) {
        return _mm256_castsi256_ps(
            _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(x), 23), _mm256_set1_epi32(127 << 23)));
    }

    // Store rows[j][at + i] as lane j of out[i * stride ..].
    template <class T>
    static void transpose(const T* const* rows, int64_t at, float* out, int64_t stride) {
        __m256 a[8], b[8];
        for (int i = 0; i < 8; ++i) a[i] = load(rows[i] + at);
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int half = 0; half < 2; ++half) {
                a[i + 2 * half] = _mm256_shuffle_ps(b[i + half], b[i + half + 2], 0x44);
                a[i + 2 * half + 1] = _mm256_shuffle_ps(b[i + half], b[i + half + 2], 0xee);
            }
        for (int i = 0; i < 4; ++i) {
            store(out + i * stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
            store(out + (i + 4) * stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
        }
    }

  private:
    // Return a mask of lanes `begin` to `end`.
    static __m256i between(int64_t begin, int64_t end) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i from = _mm256_set1_epi32(int32_t(begin) - 1), to = _mm256_set1_epi32(int32_t(end));
        return _mm256_and_si256(_mm256_cmpgt_epi32(lane, from), _mm256_cmpgt_epi32(to, lane));
    }
};

}  // namespace
}  // namespace foretell
