// The layers of a draft head over rows at any positions with any visible keys; `step.cpp` does the same for a model.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention_plan.h"
#include "pool.h"
#include "gemm.h"
#include "head_prefill.h"
#include "scratch.h"

namespace foretell {

// Rows that attend together: they share the keys of a sequence up to `context` and see `tree_slots` after it, if any.
struct AttentionSpan {
    int64_t first, rows;
    const int64_t* pages;
    const int64_t* last_visible;  // last position that each row sees
    int64_t window;               // 0: none
    int64_t skipped;              // keys at the start of the sequence that are masked
    const int64_t* tree_slots;    // slots after `context`, the same for all rows; null: all keys are in the pages
    int64_t context;
};

struct HeadScratch {
    AlignedVector<float> states, normed, concatenated, qkv, attended, projected, gate_up, gated;
    AlignedVector<float> logits;  // where the caller does not want them
    std::vector<Tile> tiles;
    std::vector<int64_t> tree_firsts;  // zeros: all rows of a span share its tree slots
    AttentionPlan attention_plan;
    QuantizedInputs quantized;
};

class Layers {
  public:
    Layers(const Head& head, Team& team, HeadScratch& memory)
        : h(head), k(kernels_of(head.level)), team(team), t(memory) {}

    void reserve(int64_t rows) {
        const int64_t heads = h.heads + 2 * h.kv_heads;
        grow(t.states, rows * h.width);
        grow(t.normed, rows * std::max(h.width, h.heads * h.head_dim));
        grow(t.concatenated, rows * 2 * h.width);
        grow(t.qkv, rows * heads * h.head_dim);
        grow(t.attended, rows * h.heads * h.head_dim);
        grow(t.projected, rows * h.width);
        grow(t.gate_up, rows * 2 * h.ffn);
        grow(t.gated, rows * h.ffn);
    }

    void linear(const Weights& weights, const float* x, int64_t rows, float* y) {
        Rows inputs = t.quantized.quantize(team, weights, x, rows);
        inputs.reuses_weights = true;  // by the next draft token
        multiply(team, weights, inputs, rows, y);
    }

    // Return whether the head reads tokens only, no hidden states.
    bool tokens_only() const { return h.fc == nullptr && h.concat_inputs == 0; }

    // Add the spans of the pairs of a prefill, as rows from `first` on. Position 0 has no hidden state before it, so
    // its key is masked.
    void add_prefill_spans(const HeadPrefill& prefill, int64_t first, std::vector<AttentionSpan>& spans) const {
        for (int64_t at = 0, stop; at < prefill.pairs; at = stop) {
            const int64_t most = tile_rows(team, prefill.pairs, prefill.pair_positions[at] + 1, h.heads, h.kv_heads);
            const int64_t sequence = prefill.sequence_of[at];
            const auto continues = [&] { return stop < prefill.pairs && prefill.sequence_of[stop] == sequence; };
            for (stop = at + 1; continues() && stop - at < most;) ++stop;
            const int64_t* const pages = prefill.pages + prefill.first_pages[sequence];
            const int64_t* const positions = prefill.pair_positions + at;
            spans.push_back(AttentionSpan{first + at, stop - at, pages, positions, h.layers[0].window, 1, nullptr, 0});
        }
    }

    // Compute the input of the first layer from tokens and the hidden states before them: `concatenated` or `states`.
    void read_inputs(const int64_t* tokens, const float* hidden_states, int64_t rows) {
        const bool concat = !tokens_only();
        for (int64_t row = 0; row < rows; ++row) {
            float* const embedded = concat ? &t.concatenated[row * 2 * h.width] : &t.states[row * h.width];
            embed(tokens[row], embedded);
            if (!concat) continue;
            float* const right = embedded + h.width;
            const float* const hidden_state = hidden_states + row * h.width;
            if (h.hidden_norm != nullptr)
                k.norm(hidden_state, h.hidden_norm, h.eps, h.width, right);
            else
                std::memcpy(right, hidden_state, h.width * sizeof *right);
            if (h.residual != kInput)
                std::memcpy(&t.states[row * h.width], h.residual == kHidden ? hidden_state : right,
                            h.width * sizeof *right);
        }
        if (h.fc != nullptr) linear(*h.fc, t.concatenated.data(), rows, t.states.data());
    }

    void embed(int64_t token, float* out) {
        std::memcpy(out, h.embed + token * h.width, h.width * sizeof *out);
        if (h.embed_scale != 1.0f)
            for (int64_t i = 0; i < h.width; ++i) out[i] *= h.embed_scale;
        if (h.embed_norm != nullptr) k.norm(out, h.embed_norm, h.eps, h.width, out);
    }

    // Return the input of a layer's attention.
    const float* attention_input(int64_t index, int64_t rows) {
        if (index == 0 && h.concat_inputs) return t.concatenated.data();
        const float* const weight = h.layers[index].attention_norm;
        if (weight == nullptr) return t.states.data();
        norm(weight, rows);
        return t.normed.data();
    }

    // Run the first `count` layers.
    void run(const std::vector<AttentionSpan>& spans, const int64_t* positions, const int64_t* slots, int64_t rows,
             int64_t count) {
        if (count > 0) make_tiles(spans, rows);
        for (int64_t i = 0; i < count; ++i) {
            const Layer& layer = h.layers[i];
            linear(*layer.qkv, attention_input(i, rows), rows, t.qkv.data());
            by_rows(team, rows, (h.heads + 2 * h.kv_heads) * h.head_dim,
                    [&](int64_t row) { rotate(layer, positions[row], slots[row], row); });
            attend(layer);
            linear(*layer.out, t.attended.data(), rows, t.projected.data());
            add(rows);
            norm(layer.ffn_norm, rows);
            linear(*layer.gate_up, t.normed.data(), rows, t.gate_up.data());
            by_rows(team, rows, 2 * h.ffn, [&](int64_t row) {
                k.glu(&t.gate_up[row * 2 * h.ffn], h.ffn, h.gelu != 0, &t.gated[row * h.ffn]);
            });
            linear(*layer.down, t.gated.data(), rows, t.projected.data());
            add(rows);
        }
    }

    // Store the states in `normed` as the output layer reads them.
    void final_norm(int64_t rows) {
        if (h.norm != nullptr)
            norm(h.norm, rows);
        else
            std::memcpy(t.normed.data(), t.states.data(), rows * h.width * sizeof(float));
    }

    const Head& h;
    const Kernels& k;
    Team& team;
    HeadScratch& t;

  private:
    void norm(const float* weight, int64_t rows) {
        by_rows(team, rows, h.width, [&](int64_t row) {
            k.norm(&t.states[row * h.width], weight, h.eps, h.width, &t.normed[row * h.width]);
        });
    }

    void add(int64_t rows) {
        by_rows(team, rows, h.width,
                [&](int64_t row) { k.add(&t.states[row * h.width], &t.projected[row * h.width], h.width); });
    }

    void rotate(const Layer& layer, int64_t position, int64_t slot, int64_t row) {
        float* const qkv = &t.qkv[row * (h.heads + 2 * h.kv_heads) * h.head_dim];
        const float* const rope_table = layer.rope_table + position * 2 * h.head_dim;
        for (int64_t head = 0; head < h.heads + h.kv_heads; ++head) {
            const bool is_query = head < h.heads;
            float* const x = qkv + head * h.head_dim;
            const float* const weight = is_query ? layer.q_norm : layer.k_norm;
            if (weight != nullptr) k.norm(x, weight, h.eps, h.head_dim, x);
            k.rotate(x, rope_table, h.head_dim, is_query ? query_scale(h.scale) : 1.0f);
        }
        store_kv(k, h, layer, slot, qkv + h.heads * h.head_dim);
    }

    void make_tiles(const std::vector<AttentionSpan>& spans, int64_t rows) {
        const int64_t stride = (h.heads + 2 * h.kv_heads) * h.head_dim;
        if (int64_t(t.tree_firsts.size()) < rows) t.tree_firsts.resize(rows);
        t.tiles.clear();
        for (const AttentionSpan& span : spans) {
            Tile tile{};
            tile.queries = &t.qkv[span.first * stride], tile.row_stride = stride;
            tile.rows = span.rows, tile.heads = h.kv_heads, tile.group = h.heads / h.kv_heads, tile.dim = h.head_dim;
            tile.positions = span.last_visible;
            tile.pages = span.pages, tile.page_size = h.page_size;
            tile.window = span.window, tile.skipped = span.skipped;
            tile.tree_slots = span.tree_slots, tile.context = span.context;
            tile.tree_first = span.tree_slots != nullptr ? t.tree_firsts.data() : nullptr;
            tile.out = &t.attended[span.first * h.heads * h.head_dim], tile.out_stride = h.heads * h.head_dim;
            t.tiles.push_back(tile);
        }
        t.attention_plan.make(t.tiles, team.threads());
    }

    void attend(const Layer& layer) {
        for (Tile& tile : t.tiles) tile.keys = layer.keys, tile.values = layer.values;
        t.attention_plan.run(team, k.attend[h.kv_type], t.tiles);
    }
};

}  // namespace foretell
