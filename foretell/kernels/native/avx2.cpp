// Kernels for AVX2 and FMA.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>
#include <limits>

// Only from here on, not in system headers: inline functions compiled for this target could be linked elsewhere.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "lanes256.h"
#include "rowwise.h"
#include "float32.h"
#include "attention.h"
#include "kv_store.h"

namespace foretell {
namespace {

constexpr int kLanes = 8, kPartBytes = kLanes * kStep;
constexpr int kMostRows = 4;  // rows whose sums fit into registers

FORETELL_INLINE __m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

FORETELL_INLINE int32_t load4(const int8_t* values) {
    int32_t bits;
    std::memcpy(&bits, values, sizeof bits);
    return bits;
}

struct Int8 {
    static constexpr int64_t kBytes = kInt8GroupBytes;

    // Widen to 16 bits: the shorter sequence with maddubs saturates.
    template <int R>
    static FORETELL_INLINE void multiply(
        const uint8_t* packed, const int8_t* values, int64_t stride, __m256i (&product)[R]) {
        const __m256i zero = _mm256_setzero_si256();
        __m256i outer[R], inner[R];  // outputs 0, 1, 4, 5 and 2, 3, 6, 7, two sums each
        for (int r = 0; r < R; ++r) outer[r] = inner[r] = zero;
        for (int k = 0; k < kGroup; k += kStep) {
            const __m256i w = load(packed + k * kBlock);
            const __m256i w_outer = _mm256_unpacklo_epi8(w, zero), w_inner = _mm256_unpackhi_epi8(w, zero);
            for (int r = 0; r < R; ++r) {
                const __m256i v = _mm256_cvtepi8_epi16(_mm_set1_epi32(load4(values + r * stride + k)));
                outer[r] = _mm256_add_epi32(outer[r], _mm256_madd_epi16(w_outer, v));
                inner[r] = _mm256_add_epi32(inner[r], _mm256_madd_epi16(w_inner, v));
            }
        }
        for (int r = 0; r < R; ++r) product[r] = _mm256_hadd_epi32(outer[r], inner[r]);
    }

    static FORETELL_INLINE __m256 scaled(__m256 product, const uint8_t*, float scale) {
        return _mm256_mul_ps(product, _mm256_set1_ps(scale));
    }

    static FORETELL_INLINE __m256 finished(__m256 sum, const Weights& weights, int64_t output) {
        return _mm256_mul_ps(sum, _mm256_loadu_ps(weights.scales + output));
    }
};

struct Int4 {
    static constexpr int64_t kBytes = kInt4GroupBytes;

    template <int R>
    static FORETELL_INLINE void multiply(
        const uint8_t* packed, const int8_t* values, int64_t stride, __m256i (&product)[R]) {
        const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
        __m256i pairs[R];  // int16 suffices: the sums of a group are at most 16 * 15 * 127
        for (int r = 0; r < R; ++r) pairs[r] = _mm256_setzero_si256();
        for (int k = 0; k < kGroup / 2; k += kStep) {
            const __m256i both = load(packed + kScaleBytes + k * kBlock);
            const __m256i first = _mm256_and_si256(both, low);
            const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            for (int r = 0; r < R; ++r) {
                const int8_t* const at = values + r * stride + k;
                const __m256i v = _mm256_set1_epi32(load4(at)), v_second = _mm256_set1_epi32(load4(at + kGroup / 2));
                pairs[r] = _mm256_add_epi16(pairs[r], _mm256_maddubs_epi16(first, v));
                pairs[r] = _mm256_add_epi16(pairs[r], _mm256_maddubs_epi16(second, v_second));
            }
        }
        for (int r = 0; r < R; ++r) product[r] = _mm256_madd_epi16(pairs[r], ones);
    }

    static FORETELL_INLINE __m256 scaled(__m256 product, const uint8_t* scales, float scale) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
        return _mm256_mul_ps(_mm256_mul_ps(product, _mm256_castsi256_ps(bits)), _mm256_set1_ps(scale));
    }

    static FORETELL_INLINE __m256 finished(__m256 sum, const Weights&, int64_t) { return sum; }
};

template <class Format>
FORETELL_INLINE void store(const Weights& weights, __m256 sum, int64_t output, float* y) {
    float out[kLanes];
    _mm256_storeu_ps(out, Format::finished(sum, weights, output));
    for (int64_t o = output; o < output + kLanes && o < weights.outputs; ++o)
        y[o] = weights.bias != nullptr ? out[o - output] + weights.bias[o] : out[o - output];
}

// Compute a quarter of a block: the registers hold no more sums.
template <class Format, int R>
FORETELL_INLINE void part_of(const Weights& weights, const Rows& rows, int64_t row, int64_t block, int part, float* y) {
    const uint8_t* packed = weights.packed + block * rows.groups * Format::kBytes;
    const int64_t stride = rows.groups * kGroup;
    __m256 sum[R];
    for (int r = 0; r < R; ++r) sum[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < rows.groups; ++g, packed += Format::kBytes) {
        const int64_t at = row * rows.groups + g;
        __m256i product[R];
        Format::multiply(packed + part * kPartBytes, rows.values + at * kGroup, stride, product);
        for (int r = 0; r < R; ++r) {
            const __m256i offset = _mm256_set1_epi32(rows.offsets[at + r * rows.groups]);
            const __m256 whole = _mm256_cvtepi32_ps(_mm256_add_epi32(product[r], offset));
            const float scale = rows.scales[at + r * rows.groups];
            sum[r] = _mm256_add_ps(sum[r], Format::scaled(whole, packed + part * kLanes * 2, scale));
        }
    }
    for (int r = 0; r < R; ++r)
        store<Format>(weights, sum[r], block * kBlock + part * kLanes, y + (row + r) * weights.outputs);
}

template <class Format, int R>
void row_tile(const Weights& weights, const Rows& rows, int64_t row, int64_t block, Prefetch, float* y) {
    for (int part = 0; part < kBlock / kLanes; ++part) part_of<Format, R>(weights, rows, row, block, part, y);
}

template <class Format>
void all_rows(const Weights& weights, const Rows& rows, int64_t first, int64_t stop, int64_t block, float* y) {
    static constexpr RowTile tile_kernels[kMostRows] = {row_tile<Format, 1>, row_tile<Format, 2>, row_tile<Format, 3>,
                                               row_tile<Format, 4>};
    for_row_tiles(tile_kernels, weights, rows, first, stop, block, Format::kBytes, y);
}

}  // namespace

const Kernels avx2_kernels{quantize, all_rows<Int8>, all_rows<Int4>, float32, norm, add, rotate, glu, attend, store_kv,
                           argmax_softmax};

}  // namespace foretell

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
