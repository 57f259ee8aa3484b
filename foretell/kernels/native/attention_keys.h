// Blocks of keys and values of the KV cache: where they are, which rows see them, and how they are loaded.
#pragma once

#include <cstring>

#include "kernels.h"
#include "rowwise.h"

namespace foretell {
namespace {

// A block of keys: the position of the first, their number and their slots.
struct Block {
    int64_t first, count = 0;
    int64_t slots[kKeys];
};

// Scales of the keys and values of a block, if their type has any.
template <class T>
struct BlockScales {};

template <>
struct BlockScales<int8_t> {
    float key_scales[kKeys], value_scales[kKeys];
};

template <class T>
constexpr bool kScaled = sizeof(T) == 1;

// Rows of keys and values of a block for one KV head.
template <class T>
struct BlockRows : BlockScales<T> {
    const T *keys[kKeys], *values[kKeys];

    // `zeros`: the key of a padded column.
    BlockRows(const Tile& tile, const Block& block, int64_t head, int64_t row_bytes, const float* zeros) {
        for (int64_t i = 0; i < block.count; ++i) {
            const int64_t at = (block.slots[i] * tile.heads + head) * row_bytes;
            keys[i] = reinterpret_cast<const T*>(tile.keys + at);
            values[i] = reinterpret_cast<const T*>(tile.values + at);
            if constexpr (kScaled<T>) {
                std::memcpy(this->key_scales + i, keys[i] + tile.dim, sizeof(float));
                std::memcpy(this->value_scales + i, values[i] + tile.dim, sizeof(float));
            }
        }
        for (int64_t i = block.count; i < kKeys; ++i) {
            keys[i] = reinterpret_cast<const T*>(zeros);
            if constexpr (kScaled<T>) this->key_scales[i] = this->value_scales[i] = 0.0f;
        }
    }
};

// Fetches the rows of a block into the cache, evenly over `calls` calls, while others are computed with.
class Prefetcher {
  public:
    Prefetcher(const Tile& tile, const Block& next, int64_t head, int64_t row_bytes, int64_t calls)
        : tile_(tile), next_(next), head_(head), row_bytes_(row_bytes), left_(2 * next.count),
          lines_(ceil_div(row_bytes, kLine)), each_(ceil_div(left_ * lines_, calls)) {}

    FORETELL_INLINE void fetch() {
        for (int64_t i = 0; i < each_; ++i, row_ += kLine, --lines_left_) {
            if (lines_left_ == 0 && !advance()) return;
            __builtin_prefetch(row_, 0, 2);
        }
    }

  private:
    bool advance() {
        if (left_ == 0) return false;
        const bool is_key = --left_ >= next_.count;
        const int64_t slot = next_.slots[is_key ? left_ - next_.count : left_];
        row_ = (is_key ? tile_.keys : tile_.values) + (slot * tile_.heads + head_) * row_bytes_;
        lines_left_ = lines_;
        return true;
    }

    const Tile& tile_;
    const Block& next_;
    const int64_t head_, row_bytes_;
    int64_t left_;  // rows
    const int64_t lines_, each_;
    int64_t lines_left_ = 0;
    const uint8_t* row_ = nullptr;
};

FORETELL_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

FORETELL_INLINE int64_t first_visible(const Tile& tile, int64_t row) {
    const int64_t first_key = tile.positions[row] + 1 - tile.window;
    return tile.window == 0 || first_key < tile.skipped ? tile.skipped : first_key;
}

// Return whether a row sees any key from `first` to `stop`.
FORETELL_INLINE bool sees(const Tile& tile, int64_t row, int64_t first, int64_t stop) {
    return tile.positions[row] >= first && first_visible(tile, row) < stop;
}

// Find the slots of up to kKeys keys from `first` to `stop` that a row sees.
FORETELL_INLINE void locate_keys(const Tile& tile, int64_t row, int64_t first, int64_t stop, Block& block) {
    block.first = first;
    block.count = min(stop - first, kKeys);
    int64_t page = first / tile.page_size, at = first % tile.page_size;
    for (int64_t i = 0; i < block.count; ++i) {
        const bool in_tree = tile.tree_slots != nullptr && first + i >= tile.context;
        block.slots[i] = in_tree ? tile.tree_slots[tile.tree_first[row] + first + i - tile.context]
                                 : tile.pages[page] * tile.page_size + at;
        if (++at == tile.page_size && !in_tree) ++page, at = 0;
    }
}

// Load the first `count` lanes of a type that has no instruction for it; the others are zero.
template <class T>
FORETELL_INLINE V load_some(const T* at, int64_t count) {
    T some[Lanes::kCount] = {};
    std::memcpy(some, at, count * sizeof *at);
    return Lanes::load(some);
}
FORETELL_INLINE V load_some(const float* at, int64_t count) { return Lanes::load_some(at, count); }

template <class T>
void transpose_keys(const BlockRows<T>& rows, int64_t count, int64_t dim, float* out) {
    count = (count + Lanes::kCount - 1) / Lanes::kCount * Lanes::kCount;  // columns after those are masked
    int64_t at = 0;
    for (; at + Lanes::kCount <= dim; at += Lanes::kCount)
        for (int64_t j = 0; j < count; j += Lanes::kCount)
            Lanes::transpose(rows.keys + j, at, out + at * kKeys + j, kKeys);
    for (int64_t j = 0; at < dim && j < count; ++j) {
        float column[Lanes::kCount];
        Lanes::store(column, load_some(rows.keys[j] + at, dim - at));
        for (int64_t d = at; d < dim; ++d) out[d * kKeys + j] = column[d - at];
    }
}

}  // namespace
}  // namespace foretell
