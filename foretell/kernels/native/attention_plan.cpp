#include "attention_plan.h"

#include <algorithm>

#include "gemm.h"
#include "scratch.h"

namespace foretell {
namespace {

constexpr int64_t kTileQueries = 96;      // queries of a KV head in a tile, which share transposed blocks of keys
constexpr int64_t kStreamedQueries = 24;  // up to so many, loading the keys takes as long as computing with them
constexpr int64_t kItemsPerThread = 4;    // evens out the work of the threads

// Working memory of a thread.
struct AttendScratch {
    std::vector<float> floats;

    float* reserve(const Tile& tile, int64_t heads) {
        const int64_t size = attend_scratch_floats(heads, tile.rows * tile.group, tile.dim);
        if (int64_t(floats.size()) < size) floats.resize(size);
        return floats.data();
    }
};

int64_t products_of(const Tile& tile) {
    const int64_t keys = *std::max_element(tile.positions, tile.positions + tile.rows) + 1;
    return 2 * tile.rows * tile.heads * tile.group * tile.dim * keys;
}

}  // namespace

int64_t tile_rows(const Team& team, int64_t rows, int64_t keys, int64_t heads, int64_t kv_heads) {
    int64_t most = std::min(std::max<int64_t>(1, kTileQueries / (heads / kv_heads)), std::max<int64_t>(1, rows));
    const auto items = [&] { return ceil_div(rows, most) * ceil_div(keys, kChunk) * kv_heads; };
    while (most > 2 && team.threads() > 1 && items() < 2 * team.threads()) most = ceil_div(most, 2);
    return most;
}

void AttentionPlan::make(const std::vector<Tile>& tiles, int threads) {
    items_.clear();
    splits_.clear();
    int64_t products = 0, states = 0;
    for (const Tile& tile : tiles) products += products_of(tile);
    parallel_ = threads > 1 && products >= kMinParallelProducts;
    for (int64_t i = 0; i < int64_t(tiles.size()); ++i) {
        const Tile& tile = tiles[i];
        const bool is_large = parallel_ && products_of(tile) > products / (kItemsPerThread * threads);
        const bool is_streamed = tile.rows * tile.group <= kStreamedQueries;
        const int64_t chunks = chunks_of(tile).stop, items = kItemsPerThread * threads;
        if (is_large && chunks > 1 && (is_streamed || tile.heads < items)) {
            const int64_t stride = tile.heads * tile.rows * tile.group * state_floats(tile.dim);
            splits_.push_back(Split{i, states, stride});
            states += chunks * stride;
            // Runs of decreasing length: long ones fetch keys ahead for longer, short ones even out the work.
            for (int64_t first = 0, length; first < chunks; first += length) {
                length = std::max<int64_t>(1, (chunks - first) / (2 * threads));
                add_items(i, int64_t(splits_.size()) - 1, ChunkRange{first, first + length}, tile.heads,
                          is_streamed && chunks >= items);
            }
        } else {
            add_items(i, kWhole, ChunkRange{0, chunks}, tile.heads, is_streamed && !is_large);
        }
    }
    if (int64_t(states_.size()) < states) states_.resize(states);
}

void AttentionPlan::add_items(int64_t tile, int64_t split, ChunkRange chunks, int64_t heads, bool together) {
    if (together) return items_.push_back(Item{tile, split, HeadRange{0, heads}, chunks});
    for (int64_t head = 0; head < heads; ++head) items_.push_back(Item{tile, split, HeadRange{head, 1}, chunks});
}

void AttentionPlan::run(Team& team, const AttentionKernels& kernels, const std::vector<Tile>& tiles) {
    const auto each = [&](int64_t count, const auto& f) {
        if (parallel_) return team.each(count, f);
        for (int64_t i = 0; i < count; ++i) f(i);
    };
    each(int64_t(items_.size()), [&](int64_t i) {
        const Item& item = items_[i];
        const Tile& tile = tiles[item.tile];
        float* const memory = scratch<AttendScratch>().reserve(tile, item.heads.count);
        if (item.split == kWhole) return kernels.attend(tile, item.heads, memory);
        const int64_t first = std::max(item.chunks.first, chunks_of(tile).first);  // of the window of this layer
        const Split& split = splits_[item.split];
        const int64_t at = split.states + first * split.stride + item.heads.first * split.stride / tile.heads;
        const ChunkRange chunks{first, item.chunks.stop};
        kernels.attend_chunks(tile, item.heads, chunks, states_.data() + at, split.stride, memory);
    });
    if (splits_.empty()) return;
    const int64_t heads = tiles[0].heads;
    each(int64_t(splits_.size()) * heads, [&](int64_t i) {
        const Split& split = splits_[i / heads];
        const Tile& tile = tiles[split.tile];
        float* const states = &states_[split.states + chunks_of(tile).first * split.stride];
        kernels.merge_chunks(tile, HeadRange{i % heads, 1}, states, split.stride);
    });
}

}  // namespace foretell
