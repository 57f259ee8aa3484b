// Attention of all tiles of a step, divided among the threads of a team.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace foretell {

// Return the rows of an attention tile over `keys` keys: enough to share blocks of keys, few enough to occupy every
// thread.
int64_t tile_rows(const Team& team, int64_t rows, int64_t keys, int64_t heads, int64_t kv_heads);

// Store the keys of a row, which its values follow, in a slot of a layer of a model or head.
template <class M, class L>
void store_kv(const Kernels& kernels, const M& model, const L& layer, int64_t slot, const float* keys) {
    const int64_t size = kv_bytes(model.kv_type, model.head_dim), first = slot * model.kv_heads;
    const float* const values = keys + model.kv_heads * model.head_dim;
    for (int64_t head = 0; head < model.kv_heads; ++head) {
        const int64_t to = (first + head) * size, from = head * model.head_dim;
        kernels.store_kv(keys + from, model.head_dim, model.kv_type, layer.keys + to);
        kernels.store_kv(values + from, model.head_dim, model.kv_type, layer.values + to);
    }
}

// How tiles are divided: by KV heads, and those over a long context also by chunks of keys. That changes no bit.
class AttentionPlan {
  public:
    void make(const std::vector<Tile>& tiles, int threads);

    // Attend all tiles. They may differ from the planned ones in window, keys and values.
    void run(Team& team, const AttentionKernels& kernels, const std::vector<Tile>& tiles);

  private:
    static constexpr int64_t kWhole = -1;

    struct Item {
        int64_t tile, split;  // split: kWhole, or its number
        HeadRange heads;
        ChunkRange chunks;
    };
    // A tile whose chunks are attended to one by one, its states in `states_` and the floats of those of a chunk.
    struct Split {
        int64_t tile, states, stride;
    };

    void add_items(int64_t tile, int64_t split, ChunkRange chunks, int64_t heads, bool together);

    std::vector<Item> items_;
    std::vector<Split> splits_;
    std::vector<float> states_;
    bool parallel_ = false;
};

}  // namespace foretell
