// One forward step of a model, all layers and the LM head, without returning to Python in between.
#include "step.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention_plan.h"
#include "entry.h"
#include "pool.h"
#include "gemm.h"
#include "tree_paths.h"
#include "softmax.h"

namespace foretell {
namespace {

// Working memory of a step; each calling thread keeps its own.
struct StepScratch {
    AlignedVector<float> states, normed, qkv, attended, projected, gate_up, gated;
    QuantizedInputs quantized;
    AttentionPlan attention_plan;

    void reserve(const Model& m, int64_t rows) {
        const int64_t heads = m.heads + 2 * m.kv_heads;
        grow(states, rows * m.width);
        grow(normed, rows * m.width);
        grow(qkv, rows * heads * m.head_dim);
        grow(attended, rows * m.heads * m.head_dim);
        grow(projected, rows * m.width);
        grow(gate_up, rows * 2 * m.ffn);
        grow(gated, rows * m.ffn);
    }
};

// Another rank failed: the step is aborted.
struct AllReduceFailed {};

class ForwardStep {
  public:
    ForwardStep(const Model& model, const Step& step, int threads, StepScratch& scratch)
        : m(model), s(step), k(kernels_of(model.level)), team(threads), t(scratch), paths(step) {
        t.reserve(m, s.rows);
        split_spans();
    }

    void run() {
        embed();
        store_hidden(0);
        for (int64_t i = 0; i < m.layer_count; ++i) {
            attention(m.layers[i], i == 0);
            feed_forward(m.layers[i], i + 1 < m.layer_count ? &m.layers[i + 1] : nullptr);
            store_hidden(i + 1);
        }
        head();
    }

  private:
    void embed() {
        for (int64_t row = 0; row < s.rows; ++row) {
            float* const state = &t.states[row * m.width];
            const int64_t token = s.tokens[row] - m.first_token;
            if (token < 0 || token >= m.tokens) {
                std::fill_n(state, m.width, 0.0f);
                continue;
            }
            std::memcpy(state, m.embed + token * m.width, m.width * sizeof *state);
            if (m.embed_scale != 1.0f)
                for (int64_t i = 0; i < m.width; ++i) state[i] *= m.embed_scale;
        }
        all_reduce(t.states);
    }

    // Sum rows over all tensor-parallel ranks.
    void all_reduce(AlignedVector<float>& rows) {
        if (s.all_reduce != nullptr && !s.all_reduce(rows.data(), s.rows * m.width)) throw AllReduceFailed();
    }

    void store_hidden(int64_t layers) {
        for (int64_t i = 0; i < s.hidden_layer_count; ++i)
            if (s.hidden_layers[i] == layers)
                for (int64_t row = 0; row < s.rows; ++row)
                    std::memcpy(s.hidden_states + (row * s.hidden_layer_count + i) * m.width, &t.states[row * m.width],
                                m.width * sizeof(float));
    }

    // Normalize a row, if the layer has a norm here, and quantize it for the weights that read it.
    void normalize_row(const float* norm, const Weights& reader, int64_t row) {
        float* const normed = &t.normed[row * m.width];
        if (norm != nullptr)
            k.norm(&t.states[row * m.width], norm, m.eps, m.width, normed);
        else
            std::memcpy(normed, &t.states[row * m.width], m.width * sizeof *normed);
        t.quantized.quantize_row(reader, normed, row);
    }

    // Add the residual, then normalize and quantize the rows for the next linear layer, if any. This is one pass: a row
    // stays in the cache, and the threads meet once.
    void add_residual(const float* post_norm, const float* next_norm, const Weights* next) {
        all_reduce(t.projected);
        if (next != nullptr) inputs = t.quantized.reserve(*next, t.normed.data(), s.rows);
        by_rows(team, s.rows, m.width, [&](int64_t row) {
            float* const projected = &t.projected[row * m.width];
            if (post_norm != nullptr) k.norm(projected, post_norm, m.eps, m.width, projected);
            if (m.residual_scale != 1.0f)
                for (int64_t i = 0; i < m.width; ++i) projected[i] *= m.residual_scale;
            k.add(&t.states[row * m.width], projected, m.width);
            if (next != nullptr) normalize_row(next_norm, *next, row);
        });
    }

    void attention(const Layer& layer, bool is_first) {
        if (is_first) {
            inputs = t.quantized.reserve(*layer.qkv, t.normed.data(), s.rows);
            by_rows(team, s.rows, m.width, [&](int64_t row) { normalize_row(layer.attention_norm, *layer.qkv, row); });
        }
        multiply(team, *layer.qkv, inputs, s.rows, t.qkv.data());
        const int64_t heads = m.heads + 2 * m.kv_heads;
        by_rows(team, s.rows, heads * m.head_dim,
                [&](int64_t row) { rotate_row(layer, row, &t.qkv[row * heads * m.head_dim]); });
        attend(layer);
        const Rows attended = t.quantized.quantize(team, *layer.out, t.attended.data(), s.rows);
        multiply(team, *layer.out, attended, s.rows, t.projected.data());
        add_residual(layer.attention_post_norm, layer.ffn_norm, layer.gate_up);
    }

    // Normalize queries and keys if the model does so, apply RoPE, and store keys and values in the KV cache.
    void rotate_row(const Layer& layer, int64_t row, float* qkv) {
        const float* const rope_table = layer.rope_table + s.positions[row] * 2 * m.head_dim;
        const float growth = layer.query_scales != nullptr ? layer.query_scales[s.positions[row]] : 1.0f;
        if (m.full_qk_norm) {
            float* const keys = qkv + m.heads * m.head_dim;
            k.norm(qkv, layer.q_norm, m.eps, m.heads * m.head_dim, qkv);
            k.norm(keys, layer.k_norm, m.eps, m.kv_heads * m.head_dim, keys);
        }
        for (int64_t head = 0; head < m.heads + m.kv_heads; ++head) {
            const bool is_query = head < m.heads;
            float* const x = qkv + head * m.head_dim;
            const float* const weight = m.full_qk_norm ? nullptr : is_query ? layer.q_norm : layer.k_norm;
            if (weight != nullptr) k.norm(x, weight, m.eps, m.head_dim, x);
            k.rotate(x, rope_table, m.head_dim, is_query ? query_scale(m.scale) * growth : 1.0f);
        }
        store_kv(k, m, layer, s.slots[row], qkv + m.heads * m.head_dim);
    }

    // Split the spans into tiles of rows that attend together.
    void split_spans() {
        for (int64_t i = 0; i < s.span_count; ++i) {
            const Span& span = s.spans[i];
            const int64_t most = tile_rows(team, s.rows, span.start + span.rows, m.heads, m.kv_heads);
            split_rows(span, span.first, span.rows - span.nodes, most, false);
            split_rows(span, span.first + span.rows - span.nodes, span.nodes, most, true);
        }
        t.attention_plan.make(tiles, team.threads());
    }

    void split_rows(const Span& span, int64_t first, int64_t rows, int64_t most, bool nodes) {
        for (int64_t parts = ceil_div(rows, most); parts > 0; --parts) {
            const int64_t count = ceil_div(rows, parts);
            add_tile(span, first, count, nodes);
            first += count;
            rows -= count;
        }
    }

    void add_tile(const Span& span, int64_t first, int64_t rows, bool nodes) {
        Tile tile{};
        tile.row_stride = (m.heads + 2 * m.kv_heads) * m.head_dim;
        tile.queries = &t.qkv[first * tile.row_stride];
        tile.rows = rows, tile.heads = m.kv_heads, tile.group = m.heads / m.kv_heads, tile.dim = m.head_dim;
        tile.positions = s.positions + first;
        tile.pages = s.pages + span.first_page, tile.page_size = m.page_size;
        tile.tree_slots = nodes ? paths.slots() : nullptr;
        tile.tree_first = nodes ? paths.firsts() + first : nullptr;
        tile.context = span.start + span.rows - span.nodes;
        tile.out = &t.attended[first * m.heads * m.head_dim];
        tile.out_stride = m.heads * m.head_dim;
        tiles.push_back(tile);
    }

    void attend(const Layer& layer) {
        for (Tile& tile : tiles) tile.keys = layer.keys, tile.values = layer.values, tile.window = layer.window;
        t.attention_plan.run(team, k.attend[m.kv_type], tiles);
    }

    void feed_forward(const Layer& layer, const Layer* next) {
        multiply(team, *layer.gate_up, inputs, s.rows, t.gate_up.data());
        const Rows gated = t.quantized.reserve(*layer.down, t.gated.data(), s.rows);
        by_rows(team, s.rows, 2 * m.ffn, [&](int64_t row) {
            k.glu(&t.gate_up[row * 2 * m.ffn], m.ffn, m.gelu != 0, &t.gated[row * m.ffn]);
            t.quantized.quantize_row(*layer.down, &t.gated[row * m.ffn], row);
        });
        multiply(team, *layer.down, gated, s.rows, t.projected.data());
        add_residual(layer.ffn_post_norm, next == nullptr ? nullptr : next->attention_norm,
                     next == nullptr ? nullptr : next->qkv);
    }

    void head() {
        if (s.logit_row_count == 0) return;
        const Rows normed = t.quantized.reserve(*m.head, t.normed.data(), s.logit_row_count);
        by_rows(team, s.logit_row_count, m.width, [&](int64_t i) {
            k.norm(&t.states[s.logit_rows[i] * m.width], m.norm, m.eps, m.width, &t.normed[i * m.width]);
            t.quantized.quantize_row(*m.head, &t.normed[i * m.width], i);
        });
        multiply(team, *m.head, normed, s.logit_row_count, s.logits);
        const int64_t vocab = m.head->outputs;
        by_rows(team, s.logit_row_count, vocab, [&](int64_t i) { s.argmax[i] = argmax(s.logits + i * vocab, vocab); });
    }

    const Model& m;
    const Step& s;
    const Kernels& k;
    Team team;
    StepScratch& t;
    Rows inputs{};  // of the next linear layer
    TreePaths paths;
    std::vector<Tile> tiles;
};

}  // namespace
}  // namespace foretell

FORETELL_API int64_t foretell_forward(const foretell::Model* model, const foretell::Step* step, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        try {
            ForwardStep(*model, *step, threads, scratch<StepScratch>()).run();
        } catch (const AllReduceFailed&) {  // the callback keeps the error, and Python raises it
        }
        return 0;
    });
}
