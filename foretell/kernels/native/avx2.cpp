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
#include "row_tiles.h"
#include "rowwise.h"
#include "float32.h"
#include "attention.h"
#include "kv_store.h"

namespace foretell {
namespace {

constexpr int kLanes = 8, kVectors = 2;   // vectors of outputs that share the broadcast inputs
constexpr int kPart = kLanes * kVectors;  // outputs computed together
constexpr int kVectorBytes = kLanes * kStep, kPartBytes = kPart * kStep;
constexpr int kMostRows = 4;   // rows whose products fit into registers
constexpr int kPassRows = 32;  // rows whose sums stay in the L1 cache while a block streams through

using Products = __m256i[kVectors];

FORETELL_INLINE __m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

template <class T>
FORETELL_INLINE __m256i repeat32(const T* values) {
    int32_t bits;
    std::memcpy(&bits, values, sizeof bits);
    return _mm256_set1_epi32(bits);
}

struct Int8 {
    static constexpr int64_t kBytes = kInt8GroupBytes;
    static constexpr int64_t kValues = 0;  // offset of the integers in a group

    // Widen to 16 bits, inputs 0 and 2 apart from 1 and 3: the shorter sequence with maddubs saturates. `wide_pairs`
    // of the inputs are in this order.
    template <int R>
    static FORETELL_INLINE void multiply(const uint8_t* packed, const Rows& rows, int64_t at, Products (&product)[R]) {
        const __m256i low = _mm256_set1_epi16(255);
#pragma GCC unroll 1  // unrolled, the products spill from the registers, and the loop takes 1.5 times as long
        for (int k = 0; k < kGroup; k += kStep) {
            __m256i even[kVectors], odd[kVectors];
            for (int v = 0; v < kVectors; ++v) {
                const __m256i w = load(packed + k * kBlock + v * kVectorBytes);
                even[v] = _mm256_and_si256(w, low);
                odd[v] = _mm256_srli_epi16(w, 8);
            }
            for (int r = 0; r < R; ++r) {
                const int16_t* const inputs = rows.wide_pairs + (at + r * rows.groups) * kGroup + k;
                const __m256i first = repeat32(inputs), second = repeat32(inputs + 2);
                for (int v = 0; v < kVectors; ++v) {
                    product[r][v] = _mm256_add_epi32(product[r][v], _mm256_madd_epi16(even[v], first));
                    product[r][v] = _mm256_add_epi32(product[r][v], _mm256_madd_epi16(odd[v], second));
                }
            }
        }
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
    static constexpr int64_t kValues = kScaleBytes;

    template <int R>
    static FORETELL_INLINE void multiply(const uint8_t* packed, const Rows& rows, int64_t at, Products (&product)[R]) {
        const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
        Products pairs[R];  // int16 suffices: the sums of a group are at most 16 * 15 * 127
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kVectors; ++v) pairs[r][v] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int k = 0; k < kGroup / 2; k += kStep) {
            __m256i first[kVectors], second[kVectors];
            for (int v = 0; v < kVectors; ++v) {
                const __m256i both = load(packed + k * kBlock + v * kVectorBytes);
                first[v] = _mm256_and_si256(both, low);
                second[v] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            }
            for (int r = 0; r < R; ++r) {
                const int8_t* const inputs = rows.values + (at + r * rows.groups) * kGroup + k;
                const __m256i x = repeat32(inputs), x_second = repeat32(inputs + kGroup / 2);
                for (int v = 0; v < kVectors; ++v) {
                    pairs[r][v] = _mm256_add_epi16(pairs[r][v], _mm256_maddubs_epi16(first[v], x));
                    pairs[r][v] = _mm256_add_epi16(pairs[r][v], _mm256_maddubs_epi16(second[v], x_second));
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kVectors; ++v)
                product[r][v] = _mm256_add_epi32(product[r][v], _mm256_madd_epi16(pairs[r][v], ones));
    }

    static FORETELL_INLINE __m256 scaled(__m256 product, const uint8_t* scales, float scale) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
        return _mm256_mul_ps(_mm256_mul_ps(product, _mm256_castsi256_ps(bits)), _mm256_set1_ps(scale));
    }

    static FORETELL_INLINE __m256 finished(__m256 sum, const Weights&, int64_t) { return sum; }
};

// Add what group `group` of the inputs contributes to the sums [R, kBlock] of rows from `row` on.
template <class Format, int R>
void add_group(const uint8_t* packed, const Rows& rows, int64_t row, int64_t group, float* sums) {
    const int64_t at = row * rows.groups + group;
    for (int part = 0; part < kBlock / kPart; ++part) {
        Products product[R];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kVectors; ++v) product[r][v] = _mm256_set1_epi32(rows.offsets[at + r * rows.groups]);
        Format::multiply(packed + Format::kValues + part * kPartBytes, rows, at, product);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kVectors; ++v) {
                const int64_t output = part * kPart + v * kLanes;
                float* const sum = sums + r * kBlock + output;
                const __m256 more =
                    Format::scaled(_mm256_cvtepi32_ps(product[r][v]), packed + output * 2, rows.scales[at + r * rows.groups]);
                _mm256_store_ps(sum, _mm256_add_ps(_mm256_load_ps(sum), more));
            }
    }
}

template <class Format>
FORETELL_INLINE void store(const Weights& weights, const float* sums, int64_t output, float* y) {
    float out[kLanes];
    _mm256_storeu_ps(out, Format::finished(_mm256_load_ps(sums), weights, output));
    for (int64_t o = output; o < output + kLanes && o < weights.outputs; ++o)
        y[o] = weights.bias != nullptr ? out[o - output] + weights.bias[o] : out[o - output];
}

using AddGroup = void (*)(const uint8_t* packed, const Rows& rows, int64_t row, int64_t group, float* sums);

// A block streams through the cache once, group by group, for all rows of a pass.
template <class Format>
void pass(const Weights& weights, const Rows& rows, int64_t first, int64_t stop, int64_t block, float* y) {
    static constexpr AddGroup add[kMostRows] = {add_group<Format, 1>, add_group<Format, 2>, add_group<Format, 3>,
                                                add_group<Format, 4>};
    alignas(32) float sums[kPassRows * kBlock];
    std::memset(sums, 0, (stop - first) * kBlock * sizeof *sums);
    const uint8_t* packed = weights.packed + block * rows.groups * Format::kBytes;
    for (int64_t g = 0; g < rows.groups; ++g, packed += Format::kBytes) {
        Prefetch{packed + kPrefetchBytes, Format::kBytes, !rows.reuses_weights}.fetch();
        int64_t row = first;
        for (int64_t tiles = ceil_div(stop - first, kMostRows); tiles > 0; --tiles) {
            const int64_t count = ceil_div(stop - row, tiles);
            add[count - 1](packed, rows, row, g, sums + (row - first) * kBlock);
            row += count;
        }
    }
    for (int64_t row = first; row < stop; ++row)
        for (int o = 0; o < kBlock; o += kLanes)
            store<Format>(weights, sums + (row - first) * kBlock + o, block * kBlock + o, y + row * weights.outputs);
}

template <class Format>
void all_rows(const Weights& weights, const Rows& rows, int64_t first, int64_t stop, int64_t block, float* y) {
    for (int64_t row = first; row < stop; row += kPassRows)
        pass<Format>(weights, rows, row, row + kPassRows < stop ? row + kPassRows : stop, block, y);
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
