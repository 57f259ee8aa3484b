// Kernels for CPUs without AVX2.
#include "kernels.h"
#include "lanes128.h"
#include "rowwise.h"
#include "float32.h"
#include "attention.h"
#include "kv_store.h"

namespace foretell {
namespace {

// Multiply rows by a block of outputs, group by group; `Group` computes what one group adds.
template <class Group>
void multiply_block(const Weights& weights, const Rows& rows, int64_t first, int64_t stop, int64_t block, float* y) {
    const int64_t begin = block * kBlock, valid = valid_outputs(weights, block);
    const uint8_t* const packed = weights.packed + block * rows.groups * Group::kBytes;
    for (int64_t row = first; row < stop; ++row) {
        float total[kBlock] = {};
        for (int64_t at = row * rows.groups, g = 0; g < rows.groups; ++g, ++at)
            Group::add(packed + g * Group::kBytes, rows.values + at * kGroup, rows.offsets[at], rows.scales[at], total);
        float* const out = y + row * weights.outputs + begin;
        for (int64_t o = 0; o < valid; ++o) {
            out[o] = weights.scales != nullptr ? total[o] * weights.scales[begin + o] : total[o];
            if (weights.bias != nullptr) out[o] += weights.bias[begin + o];
        }
    }
}

struct Int8Group {
    static constexpr int64_t kBytes = kInt8GroupBytes;

    static void add(const uint8_t* packed, const int8_t* values, int32_t offset, float scale, float* total) {
        int32_t product[kBlock];
        for (int o = 0; o < kBlock; ++o) product[o] = offset;
        for (int k = 0; k < kGroup; k += kStep)
            for (int o = 0; o < kBlock; ++o)
                for (int i = 0; i < kStep; ++i) product[o] += packed[k * kBlock + o * kStep + i] * values[k + i];
        for (int o = 0; o < kBlock; ++o) total[o] += float(product[o]) * scale;
    }
};

struct Int4Group {
    static constexpr int64_t kBytes = kInt4GroupBytes;
    static constexpr int kHalf = kGroup / 2;  // the second half of the inputs is in the high nibbles of the first

    static float from_bfloat16(const uint8_t* scale) {
        uint16_t high;
        std::memcpy(&high, scale, sizeof high);
        const uint32_t bits = uint32_t(high) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    static void add(const uint8_t* packed, const int8_t* values, int32_t offset, float scale, float* total) {
        const uint8_t* const nibbles = packed + kScaleBytes;
        int32_t product[kBlock];
        for (int o = 0; o < kBlock; ++o) product[o] = offset;
        for (int k = 0; k < kHalf; k += kStep)
            for (int o = 0; o < kBlock; ++o)
                for (int i = 0; i < kStep; ++i) {
                    const uint8_t both = nibbles[k * kBlock + o * kStep + i];
                    product[o] += (both & 15) * values[k + i] + (both >> 4) * values[k + i + kHalf];
                }
        for (int o = 0; o < kBlock; ++o) total[o] += float(product[o]) * from_bfloat16(packed + o * 2) * scale;
    }
};

}  // namespace

const Kernels portable_kernels{quantize, multiply_block<Int8Group>, multiply_block<Int4Group>, float32, norm, add,
                               rotate, glu, attend, store_kv, argmax_softmax};

}  // namespace foretell
