// A head's layers over some rows: what `step.cpp` does for a model, where rows may stand anywhere and see anything.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "pool.h"
#include "product.h"
#include "reading.h"
#include "scratch.h"

namespace foretell {

inline void grow(std::vector<float>& room, int64_t size) {
    if (int64_t(room.size()) < size) room.resize(size);
}

// Rows that attend together: they share a text's keys up to `shared`, and behind it see slots of their own, if any.
struct Seen {
    int64_t first, rows;
    const int64_t* pages;
    const int64_t* sees;    // the last place each row sees
    int64_t window;         // 0: all
    int64_t hidden;         // keys at the text's beginning that nobody sees
    const int64_t* own;     // slots behind `shared`, the same for all rows; null: all lie in the pages
    int64_t shared;
};

struct HeadRoom {
    std::vector<float> states, normed, joined, qkv, seen, mixed, gate_up, gated;
    std::vector<float> logits;  // that nobody else reads
    Quantized quantized;
};

class Layers {
  public:
    Layers(const Head& head, Team& team, HeadRoom& room) : h(head), k(kernels_of(head.level)), team(team), t(room) {}

    void fit(int64_t rows) {
        const int64_t heads = h.heads + 2 * h.kv_heads;
        grow(t.states, rows * h.width);
        grow(t.normed, rows * std::max(h.width, h.heads * h.head_dim));
        grow(t.joined, rows * 2 * h.width);
        grow(t.qkv, rows * heads * h.head_dim);
        grow(t.seen, rows * h.heads * h.head_dim);
        grow(t.mixed, rows * h.width);
        grow(t.gate_up, rows * 2 * h.ffn);
        grow(t.gated, rows * h.ffn);
    }

    void linear(const Weights& weights, const float* x, int64_t rows, float* y) {
        multiply(team, weights, t.quantized.of(team, weights, x, rows), rows, y);
    }

    // Whether it reads tokens alone: no feature is looked at.
    bool reads_tokens() const { return h.join == nullptr && h.side_by_side == 0; }

    // The places that are read, as rows from `first` on. The first place of a text has no feature before it: nobody
    // sees it.
    void see(const Reading& reading, int64_t first, std::vector<Seen>& seen) const {
        const int64_t most = tile_rows(team, reading.pairs, h.heads, h.kv_heads);
        for (int64_t at = 0, stop; at < reading.pairs; at = stop) {
            const int64_t text = reading.texts[at];
            for (stop = at + 1; stop < reading.pairs && reading.texts[stop] == text && stop - at < most;) ++stop;
            const int64_t* const pages = reading.pages + reading.first_pages[text];
            seen.push_back(Seen{first + at, stop - at, pages, reading.at + at, h.layers[0].window, 1, nullptr, 0});
        }
    }

    // Tokens and the features before them become what the first layer reads: joined, or states.
    void read(const int64_t* tokens, const float* features, int64_t rows) {
        const bool both = !reads_tokens();
        for (int64_t row = 0; row < rows; ++row) {
            float* const embedded = both ? &t.joined[row * 2 * h.width] : &t.states[row * h.width];
            embed(tokens[row], embedded);
            if (!both) continue;
            float* const beside = embedded + h.width;
            const float* const feature = features + row * h.width;
            if (h.feature_norm != nullptr)
                k.norm(feature, h.feature_norm, h.eps, h.width, beside);
            else
                std::memcpy(beside, feature, h.width * sizeof *beside);
            if (h.residual != kInput)
                std::memcpy(&t.states[row * h.width], h.residual == kFeature ? feature : beside, h.width * sizeof *beside);
        }
        if (h.join != nullptr) linear(*h.join, t.joined.data(), rows, t.states.data());
    }

    void embed(int64_t token, float* out) {
        std::memcpy(out, h.embed + token * h.width, h.width * sizeof *out);
        if (h.embed_scale != 1.0f)
            for (int64_t i = 0; i < h.width; ++i) out[i] *= h.embed_scale;
        if (h.embed_norm != nullptr) k.norm(out, h.embed_norm, h.eps, h.width, out);
    }

    // What attention of a layer reads.
    const float* reads(int64_t index, int64_t rows) {
        if (index == 0 && h.side_by_side) return t.joined.data();
        const float* const weight = h.layers[index].attention_norm;
        if (weight == nullptr) return t.states.data();
        norm(weight, rows);
        return t.normed.data();
    }

    // The first `count` layers.
    void run(const std::vector<Seen>& seen, const int64_t* places, const int64_t* slots, int64_t rows, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            const Layer& layer = h.layers[i];
            linear(*layer.qkv, reads(i, rows), rows, t.qkv.data());
            by_rows(team, rows, (h.heads + 2 * h.kv_heads) * h.head_dim,
                    [&](int64_t row) { turn(layer, places[row], slots[row], row); });
            attend(layer, seen);
            linear(*layer.out, t.seen.data(), rows, t.mixed.data());
            add(rows);
            norm(layer.ffn_norm, rows);
            linear(*layer.gate_up, t.normed.data(), rows, t.gate_up.data());
            by_rows(team, rows, 2 * h.ffn, [&](int64_t row) {
                k.gate(&t.gate_up[row * 2 * h.ffn], h.ffn, h.gelu != 0, &t.gated[row * h.ffn]);
            });
            linear(*layer.down, t.gated.data(), rows, t.mixed.data());
            add(rows);
        }
    }

    // The states as the output reads them, in `normed`.
    void finish(int64_t rows) {
        if (h.norm != nullptr)
            norm(h.norm, rows);
        else
            std::memcpy(t.normed.data(), t.states.data(), rows * h.width * sizeof(float));
    }

    const Head& h;
    const Kernels& k;
    Team& team;
    HeadRoom& t;

  private:
    void norm(const float* weight, int64_t rows) {
        by_rows(team, rows, h.width, [&](int64_t row) {
            k.norm(&t.states[row * h.width], weight, h.eps, h.width, &t.normed[row * h.width]);
        });
    }

    void add(int64_t rows) {
        by_rows(team, rows, h.width,
                [&](int64_t row) { k.add(&t.states[row * h.width], &t.mixed[row * h.width], h.width); });
    }

    void turn(const Layer& layer, int64_t place, int64_t slot, int64_t row) {
        float* const qkv = &t.qkv[row * (h.heads + 2 * h.kv_heads) * h.head_dim];
        const float* const turns = layer.turns + place * 2 * h.head_dim;
        for (int64_t head = 0; head < h.heads + h.kv_heads; ++head) {
            const bool is_query = head < h.heads;
            float* const x = qkv + head * h.head_dim;
            const float* const weight = is_query ? layer.q_norm : layer.k_norm;
            if (weight != nullptr) k.norm(x, weight, h.eps, h.head_dim, x);
            k.turn(x, turns, h.head_dim, is_query ? h.scale : 1.0f);
        }
        const int64_t size = h.kv_heads * h.head_dim;
        const float* const keys = qkv + h.heads * h.head_dim;
        std::memcpy(layer.keys + slot * size, keys, size * sizeof *keys);
        std::memcpy(layer.values + slot * size, keys + size, size * sizeof *keys);
    }

    void attend(const Layer& layer, const std::vector<Seen>& seen) {
        int64_t products = 0;
        for (const Seen& each : seen) products += 2 * each.rows * (each.sees[0] + 1) * h.heads * h.head_dim;
        const int64_t items = int64_t(seen.size()) * h.kv_heads;
        const auto one = [&](int64_t item) { attend_piece(layer, seen[item / h.kv_heads], item % h.kv_heads); };
        if (products >= kWorthSharing)
            team.each(items, one);
        else
            for (int64_t item = 0; item < items; ++item) one(item);
    }

    void attend_piece(const Layer& layer, const Seen& seen, int64_t head) {
        AttendRoom& own = scratch<AttendRoom>();
        std::vector<int64_t>& firsts = own.firsts;
        if (int64_t(firsts.size()) < seen.rows) firsts.resize(seen.rows);  // all zero: rows share what is their own
        const int64_t share = h.heads / h.kv_heads, stride = (h.heads + 2 * h.kv_heads) * h.head_dim;
        Tile tile;
        tile.queries = &t.qkv[seen.first * stride + head * share * h.head_dim];
        tile.row_stride = stride, tile.rows = seen.rows, tile.share = share, tile.dim = h.head_dim;
        tile.positions = seen.sees;
        tile.keys = layer.keys + head * h.head_dim, tile.values = layer.values + head * h.head_dim;
        tile.slot_stride = h.kv_heads * h.head_dim;
        tile.pages = seen.pages, tile.page_size = h.page_size, tile.window = seen.window;
        tile.hidden = seen.hidden;
        tile.own = seen.own, tile.own_first = seen.own != nullptr ? firsts.data() : nullptr;
        tile.shared = seen.shared;
        tile.out = &t.seen[seen.first * h.heads * h.head_dim + head * share * h.head_dim];
        tile.out_stride = h.heads * h.head_dim;
        grow(own.floats, attend_room(tile.rows * share, tile.dim));
        k.attend(tile, own.floats.data());
    }
};

}  // namespace foretell
