// Kernels for AVX-512 VNNI, which multiplies and adds 64 bytes per instruction.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>
#include <limits>

// Only from here on, not in system headers: inline functions compiled for this target could be linked elsewhere.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni")
#endif

#include "lanes512.h"
#include "rowwise.h"
#include "float32.h"
#include "attention.h"
#include "kv_store.h"

namespace foretell {
namespace {

static_assert(kGroup == kBlock, "halves of a group and of a block have as many lanes");
constexpr int kLanes = 16, kHalves = kBlock / kLanes, kHalfBytes = kLanes * kStep;
constexpr int kMostRows = 5;  // rows whose sums fit into registers

FORETELL_INLINE __m512i repeat4(const int8_t* values) {
    int32_t four;
    std::memcpy(&four, values, sizeof four);
    return _mm512_set1_epi32(four);
}

struct Int8 {
    static constexpr int64_t kBytes = kInt8GroupBytes;

    template <int R>
    static FORETELL_INLINE void multiply(
        const uint8_t* packed, const int8_t* values, int64_t stride, __m512i (&product)[R][kHalves]) {
        for (int k = 0; k < kGroup; k += kStep) {
            const __m512i w0 = _mm512_loadu_si512(packed + k * kBlock);
            const __m512i w1 = _mm512_loadu_si512(packed + k * kBlock + kHalfBytes);
            for (int r = 0; r < R; ++r) {
                const __m512i v = repeat4(values + r * stride + k);
                product[r][0] = _mm512_dpbusd_epi32(product[r][0], w0, v);
                product[r][1] = _mm512_dpbusd_epi32(product[r][1], w1, v);
            }
        }
    }

    static FORETELL_INLINE __m512 scaled(__m512 product, const uint8_t*, int, float scale) {
        return _mm512_mul_ps(product, _mm512_set1_ps(scale));
    }

    static FORETELL_INLINE __m512 finished(__m512 sum, const Weights& weights, int64_t output) {
        return _mm512_mul_ps(sum, _mm512_loadu_ps(weights.scales + output));
    }
};

struct Int4 {
    static constexpr int64_t kBytes = kInt4GroupBytes;

    template <int R>
    static FORETELL_INLINE void multiply(
        const uint8_t* packed, const int8_t* values, int64_t stride, __m512i (&product)[R][kHalves]) {
        const __m512i low = _mm512_set1_epi8(15);
        for (int k = 0; k < kGroup / 2; k += kStep)
            for (int h = 0; h < kHalves; ++h) {
                const __m512i both = _mm512_loadu_si512(packed + kScaleBytes + k * kBlock + h * kHalfBytes);
                const __m512i first = _mm512_and_si512(both, low);
                const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                for (int r = 0; r < R; ++r) {
                    const int8_t* const at = values + r * stride + k;
                    product[r][h] = _mm512_dpbusd_epi32(product[r][h], first, repeat4(at));
                    product[r][h] = _mm512_dpbusd_epi32(product[r][h], second, repeat4(at + kGroup / 2));
                }
            }
    }

    static FORETELL_INLINE __m512 scaled(__m512 product, const uint8_t* packed, int half, float scale) {
        const auto* const at = reinterpret_cast<const __m256i*>(packed + half * kLanes * 2);
        const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at)), 16);
        return _mm512_mul_ps(_mm512_mul_ps(product, _mm512_castsi512_ps(bits)), _mm512_set1_ps(scale));
    }

    static FORETELL_INLINE __m512 finished(__m512 sum, const Weights&, int64_t) { return sum; }
};

template <class Format>
FORETELL_INLINE void store(const Weights& weights, __m512 sum, int64_t output, float* y) {
    const int64_t valid = weights.outputs - output;
    const __mmask16 mask = valid >= kLanes ? 0xffff : valid <= 0 ? 0 : (1u << valid) - 1;
    sum = Format::finished(sum, weights, output);
    if (weights.bias != nullptr) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, weights.bias + output));
    _mm512_mask_storeu_ps(y + output, mask, sum);
}

template <class Format, int R>
void row_tile(const Weights& weights, const Rows& rows, int64_t row, int64_t block, Prefetch prefetch, float* y) {
    const uint8_t* packed = weights.packed + block * rows.groups * Format::kBytes;
    const int64_t stride = rows.groups * kGroup;
    __m512 sum[R][kHalves];
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < kHalves; ++h) sum[r][h] = _mm512_setzero_ps();
    for (int64_t g = 0; g < rows.groups; ++g, packed += Format::kBytes) {
        const int64_t at = row * rows.groups + g;
        __m512i product[R][kHalves];
        for (int r = 0; r < R; ++r)
            for (int h = 0; h < kHalves; ++h) product[r][h] = _mm512_set1_epi32(rows.offsets[at + r * rows.groups]);
        prefetch.fetch();
        Format::multiply(packed, rows.values + at * kGroup, stride, product);
        for (int r = 0; r < R; ++r)
            for (int h = 0; h < kHalves; ++h) {
                const __m512 whole = _mm512_cvtepi32_ps(product[r][h]);
                sum[r][h] = _mm512_add_ps(sum[r][h], Format::scaled(whole, packed, h, rows.scales[at + r * rows.groups]));
            }
    }
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < kHalves; ++h)
            store<Format>(weights, sum[r][h], block * kBlock + h * kLanes, y + (row + r) * weights.outputs);
}

template <class Format>
void all_rows(const Weights& weights, const Rows& rows, int64_t first, int64_t stop, int64_t block, float* y) {
    static constexpr RowTile tile_kernels[kMostRows] = {row_tile<Format, 1>, row_tile<Format, 2>, row_tile<Format, 3>,
                                               row_tile<Format, 4>, row_tile<Format, 5>};
    for_row_tiles(tile_kernels, weights, rows, first, stop, block, Format::kBytes, y);
}

// Quantize up to 16 whole groups, as `quantize_group` does: one division for the scales of all of them.
FORETELL_INLINE void quantize_groups(
    const float* x, int64_t count, int32_t excess, int8_t* values, float* scales, int32_t* offsets) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    alignas(64) int32_t peaks[kLanes] = {}, sums[kLanes];
    alignas(64) float inverses[kLanes];
    for (int64_t g = 0; g < count; ++g) {
        const __m512i a = _mm512_loadu_si512(x + g * kGroup), b = _mm512_loadu_si512(x + g * kGroup + kLanes);
        const __m512i highest = _mm512_max_epi32(_mm512_and_si512(a, magnitude), _mm512_and_si512(b, magnitude));
        peaks[g] = _mm512_reduce_max_epi32(highest);
    }
    const __m512i bits = _mm512_load_si512(peaks);
    const __m512 peak = _mm512_castsi512_ps(bits), most = _mm512_set1_ps(127.0f);
    const __mmask16 valid = __mmask16((1u << count) - 1);
    const __mmask16 finite = _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(kInfinity));
    const __mmask16 usual = _mm512_mask_cmp_ps_mask(finite, peak, _mm512_set1_ps(kMinAbsmax), _CMP_GT_OQ);
    const __m512 special = _mm512_maskz_mov_ps(~finite, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
    _mm512_mask_storeu_ps(scales, valid, _mm512_mask_div_ps(special, usual, peak, most));
    _mm512_store_ps(inverses, _mm512_maskz_div_ps(usual, most, peak));
    const __m512 rounder = _mm512_set1_ps(kRounder);
    for (int64_t g = 0; g < count; ++g) {
        const __mmask16 kept = usual >> g & 1 ? 0xffff : 0;
        const __m512 inverse = _mm512_set1_ps(inverses[g]);
        __m512i sum = _mm512_setzero_si512();
        for (int h = 0; h < kHalves; ++h) {
            const int64_t at = g * kGroup + h * kLanes;
            const __m512 shifted = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x + at), inverse), rounder);
            const __m512i whole =
                _mm512_maskz_sub_epi32(kept, _mm512_castps_si512(shifted), _mm512_castps_si512(rounder));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(values + at), _mm512_cvtepi32_epi8(whole));
            sum = _mm512_add_epi32(sum, whole);
        }
        sums[g] = _mm512_reduce_add_epi32(sum);
    }
    const __m512i offset = _mm512_mullo_epi32(_mm512_load_si512(sums), _mm512_set1_epi32(-excess));
    _mm512_mask_storeu_epi32(offsets, valid, offset);
}

void quantize_wide(const float* x, int64_t inputs, int32_t excess, int8_t* values, float* scales, int32_t* offsets) {
    const int64_t whole = inputs / kGroup;
    for (int64_t g = 0; g < whole; g += kLanes) {
        const int64_t count = whole - g < kLanes ? whole - g : kLanes;
        quantize_groups(x + g * kGroup, count, excess, values + g * kGroup, scales + g, offsets + g);
    }
    const int64_t done = whole * kGroup;  // the rest is less than a group
    if (done < inputs) quantize_row(x + done, inputs - done, excess, values + done, scales + whole, offsets + whole);
}

}  // namespace

const Kernels vnni_kernels{quantize_wide, all_rows<Int8>, all_rows<Int4>, float32, norm, add, rotate, glu, attend,
                           store_kv, argmax_softmax};

}  // namespace foretell

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
