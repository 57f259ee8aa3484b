// All layers of a step and its head, without a return to Python in between.
#include "step.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "entry.h"
#include "pool.h"
#include "product.h"
#include "trees.h"
#include "weigh.h"

namespace foretell {
namespace {

// What a step works in; each thread that calls keeps its own.
struct Scratch {
    std::vector<float> states, normed, qkv, seen, mixed, gate_up, gated;
    Quantized quantized;

    void fit(const Model& m, int64_t rows) {
        const int64_t heads = m.heads + 2 * m.kv_heads;
        grow(states, rows * m.width);
        grow(normed, rows * m.width);
        grow(qkv, rows * heads * m.head_dim);
        grow(seen, rows * m.heads * m.head_dim);
        grow(mixed, rows * m.width);
        grow(gate_up, rows * 2 * m.ffn);
        grow(gated, rows * m.ffn);
    }

    static void grow(std::vector<float>& room, int64_t size) {
        if (int64_t(room.size()) < size) room.resize(size);
    }
};

// Another rank failed: the step is broken off.
struct Parted {};

// Rows of one span that attend together.
struct Piece {
    const Span* span;
    int64_t first, rows;  // of the batch
    bool nodes;
};

class Run {
  public:
    Run(const Model& model, const Step& step, int threads, Scratch& scratch)
        : m(model), s(step), k(kernels_of(model.level)), team(threads), t(scratch), paths(step) {
        t.fit(m, s.rows);
        cut();
    }

    void whole() {
        embed();
        tap(0);
        for (int64_t i = 0; i < m.layer_count; ++i) {
            attention(m.layers[i]);
            feed_forward(m.layers[i]);
            tap(i + 1);
        }
        head();
    }

  private:
    void linear(const Weights& weights, const std::vector<float>& x, int64_t rows, float* y) {
        multiply(team, weights, t.quantized.of(team, weights, x.data(), rows), rows, y);
    }

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
        join(t.states);
    }

    // What the other ranks have is added to what this one has.
    void join(std::vector<float>& rows) {
        if (s.join != nullptr && !s.join(rows.data(), s.rows * m.width)) throw Parted();
    }

    void tap(int64_t layers) {
        for (int64_t i = 0; i < s.tap_count; ++i)
            if (s.taps[i] == layers)
                for (int64_t row = 0; row < s.rows; ++row)
                    std::memcpy(s.features + (row * s.tap_count + i) * m.width, &t.states[row * m.width],
                                m.width * sizeof(float));
    }

    void norm_rows(const float* weight) {
        by_rows(team, s.rows, m.width, [&](int64_t row) {
            k.norm(&t.states[row * m.width], weight, m.eps, m.width, &t.normed[row * m.width]);
        });
    }

    void add_mixed(const float* post_norm) {
        join(t.mixed);
        by_rows(team, s.rows, m.width, [&](int64_t row) {
            float* const mixed = &t.mixed[row * m.width];
            if (post_norm != nullptr) k.norm(mixed, post_norm, m.eps, m.width, mixed);
            k.add(&t.states[row * m.width], mixed, m.width);
        });
    }

    void attention(const Layer& layer) {
        norm_rows(layer.attention_norm);
        linear(*layer.qkv, t.normed, s.rows, t.qkv.data());
        const int64_t heads = m.heads + 2 * m.kv_heads;
        by_rows(team, s.rows, heads * m.head_dim, [&](int64_t row) { turn_row(layer, row, &t.qkv[row * heads * m.head_dim]); });
        attend(layer);
        linear(*layer.out, t.seen, s.rows, t.mixed.data());
        add_mixed(layer.attention_post_norm);
    }

    // Queries and keys are normed where the model does so, and turned; keys and values go to their slot.
    void turn_row(const Layer& layer, int64_t row, float* qkv) {
        const float* const turns = layer.turns + s.positions[row] * 2 * m.head_dim;
        for (int64_t head = 0; head < m.heads + m.kv_heads; ++head) {
            const bool is_query = head < m.heads;
            float* const x = qkv + head * m.head_dim;
            const float* const weight = is_query ? layer.q_norm : layer.k_norm;
            if (weight != nullptr) k.norm(x, weight, m.eps, m.head_dim, x);
            k.turn(x, turns, m.head_dim, is_query ? m.scale : 1.0f);
        }
        const int64_t size = m.kv_heads * m.head_dim;
        const float* const keys = qkv + m.heads * m.head_dim;
        std::memcpy(layer.keys + s.slots[row] * size, keys, size * sizeof *keys);
        std::memcpy(layer.values + s.slots[row] * size, keys + size, size * sizeof *keys);
    }

    // Cut the spans into pieces: large enough to share blocks of keys, small enough to keep every thread busy.
    void cut() {
        const int64_t most = tile_rows(team, s.rows, m.heads, m.kv_heads);
        for (int64_t i = 0; i < s.span_count; ++i) {
            const Span& span = s.spans[i];
            cut_rows(span, span.first, span.rows - span.nodes, most, false);
            cut_rows(span, span.first + span.rows - span.nodes, span.nodes, most, true);
        }
    }

    void cut_rows(const Span& span, int64_t first, int64_t rows, int64_t most, bool nodes) {
        for (int64_t turns = up(rows, most); turns > 0; --turns) {
            const int64_t now = up(rows, turns);
            pieces.push_back(Piece{&span, first, now, nodes});
            products += 2 * now * (span.start + span.rows) * m.heads * m.head_dim;
            first += now;
            rows -= now;
        }
    }

    void attend(const Layer& layer) {
        const int64_t items = int64_t(pieces.size()) * m.kv_heads;
        const auto one = [&](int64_t item) {
            attend_piece(layer, pieces[item / m.kv_heads], item % m.kv_heads);
        };
        if (products >= kWorthSharing)
            team.each(items, one);
        else
            for (int64_t item = 0; item < items; ++item) one(item);
    }

    void attend_piece(const Layer& layer, const Piece& piece, int64_t head) {
        std::vector<float>& room = scratch<AttendRoom>().floats;
        const int64_t share = m.heads / m.kv_heads, stride = (m.heads + 2 * m.kv_heads) * m.head_dim;
        const Span& span = *piece.span;
        Tile tile;
        tile.queries = &t.qkv[piece.first * stride + head * share * m.head_dim];
        tile.row_stride = stride, tile.rows = piece.rows, tile.share = share, tile.dim = m.head_dim;
        tile.positions = s.positions + piece.first;
        tile.keys = layer.keys + head * m.head_dim, tile.values = layer.values + head * m.head_dim;
        tile.slot_stride = m.kv_heads * m.head_dim;
        tile.pages = s.pages + span.first_page, tile.page_size = m.page_size, tile.window = layer.window;
        tile.hidden = 0;
        tile.own = piece.nodes ? paths.slots() : nullptr;
        tile.own_first = piece.nodes ? paths.firsts() + piece.first : nullptr;
        tile.shared = span.start + span.rows - span.nodes;
        tile.out = &t.seen[piece.first * m.heads * m.head_dim + head * share * m.head_dim];
        tile.out_stride = m.heads * m.head_dim;
        Scratch::grow(room, attend_room(tile.rows * share, tile.dim));
        k.attend(tile, room.data());
    }

    void feed_forward(const Layer& layer) {
        norm_rows(layer.ffn_norm);
        linear(*layer.gate_up, t.normed, s.rows, t.gate_up.data());
        by_rows(team, s.rows, 2 * m.ffn, [&](int64_t row) {
            k.gate(&t.gate_up[row * 2 * m.ffn], m.ffn, m.gelu != 0, &t.gated[row * m.ffn]);
        });
        linear(*layer.down, t.gated, s.rows, t.mixed.data());
        add_mixed(layer.ffn_post_norm);
    }

    void head() {
        by_rows(team, s.wanted_count, m.width, [&](int64_t i) {
            k.norm(&t.states[s.wanted[i] * m.width], m.norm, m.eps, m.width, &t.normed[i * m.width]);
        });
        if (s.wanted_count > 0) linear(*m.head, t.normed, s.wanted_count, s.logits);
        const int64_t vocab = m.head->outputs;
        by_rows(team, s.wanted_count, vocab, [&](int64_t i) { s.likeliest[i] = first_largest(s.logits + i * vocab, vocab); });
    }

    const Model& m;
    const Step& s;
    const Kernels& k;
    Team team;
    Scratch& t;
    Paths paths;
    std::vector<Piece> pieces;
    int64_t products = 0;  // of attention in one layer
};

}  // namespace
}  // namespace foretell

FORETELL_API int64_t foretell_step(const foretell::Model* model, const foretell::Step* step, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        try {
            Run(*model, *step, threads, scratch<Scratch>()).whole();
        } catch (const Parted&) {  // the callback keeps its error, and Python raises it
        }
        return 0;
    });
}
