// SIMD lanes of sixteen floats with AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace foretell {
namespace {

struct Lanes {
    using V = __m512;
    static constexpr int kCount = 16;
    static constexpr int kRows = 12;    // rows of a float32 product: with two vectors each, the sums fill the registers
    static constexpr int kAcross = 4;   // vectors of a value that attention accumulates at once

    static V zero() { return _mm512_setzero_ps(); }
    static V all(float x) { return _mm512_set1_ps(x); }
    static V load(const float* at) { return _mm512_loadu_ps(at); }
    static void store(float* at, V x) { _mm512_storeu_ps(at, x); }
    static V add(V a, V b) { return _mm512_add_ps(a, b); }
    static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
    static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
    static V div(V a, V b) { return _mm512_div_ps(a, b); }
    static V max(V a, V b) { return _mm512_max_ps(a, b); }
    static V min(V a, V b) { return _mm512_min_ps(a, b); }
    static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum(V x) { return _mm512_reduce_add_ps(x); }
    static float peak(V x) { return _mm512_reduce_max_ps(x); }

    static V load(const Bfloat16* at) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static V load(const Float16* at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    static V load(const int8_t* at) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
    }
    static void store(Float16* at, V x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }

    // Load the first `count` lanes; the others are zero.
    static V load_some(const float* at, int64_t count) { return _mm512_maskz_loadu_ps(first(count), at); }
    static void store_some(float* at, V x, int64_t count) { _mm512_mask_storeu_ps(at, first(count), x); }

    // Return lanes `begin` to `end` of x; the others are `rest`.
    static V keep(V x, int64_t begin, int64_t end, V rest) {
        return _mm512_mask_blend_ps(first(end) & ~first(begin), rest, x);
    }

    // Return 2^whole for integers from -126 to 127.
    static V power_of_two(V whole) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127)), 23));
    }

    // Return 2^n for x = 1.5 * 2^23 + n, which rounds to an integer; n from -126 to 127.
    static V power_of_rounded(V x) {
        return _mm512_castsi512_ps(
            _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(x), 23), _mm512_set1_epi32(127 << 23)));
    }

    // Store rows[j][at + i] as lane j of out[i * stride ..].
    template <class T>
    static void transpose(const T* const* rows, int64_t at, float* out, int64_t stride) {
        __m512 a[16], b[16];
        for (int i = 0; i < 16; ++i) a[i] = load(rows[i] + at);
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 16; i += 4)
            for (int half = 0; half < 2; ++half) {
                const __m512d low = _mm512_castps_pd(b[i + half]), high = _mm512_castps_pd(b[i + half + 2]);
                a[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
                a[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
            }
        for (int i = 0; i < 4; ++i) {
            const __m512 low01 = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
            const __m512 low23 = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
            const __m512 high01 = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
            const __m512 high23 = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
            store(out + (i + 0) * stride, _mm512_shuffle_f32x4(low01, low23, 0x88));
            store(out + (i + 4) * stride, _mm512_shuffle_f32x4(high01, high23, 0x88));
            store(out + (i + 8) * stride, _mm512_shuffle_f32x4(low01, low23, 0xdd));
            store(out + (i + 12) * stride, _mm512_shuffle_f32x4(high01, high23, 0xdd));
        }
    }

  private:
    static __mmask16 first(int64_t count) {
        return count >= kCount ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1);
    }
};

}  // namespace
}  // namespace foretell
