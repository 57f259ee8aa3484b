// Prefill of a draft head over positions that the target has run, without returning to Python in between.
#include "head_prefill.h"

#include "entry.h"
#include "layers.h"

namespace foretell {
namespace {

struct PrefillScratch {
    HeadScratch layers;
    AlignedVector<float> concatenated, projected, previous, keys_values;
};

class HeadPrefiller {
  public:
    HeadPrefiller(const PrefillHead& head, const HeadPrefill& prefill, int threads, PrefillScratch& memory)
        : team(threads), layers(head.head, team, memory.layers), k(layers.k), r(head), h(head.head), a(prefill),
          t(memory) {
        layers.reserve(std::max(a.rows, a.pairs));
    }

    void run() {
        if (!r.pairs || !layers.tokens_only()) project();  // a head over tokens only does not use target states
        if (r.hidden_states != nullptr)
            for (int64_t row = 0; row < a.rows; ++row)
                std::memcpy(r.hidden_states + a.slots[row] * h.width, &t.projected[row * h.width],
                            h.width * sizeof(float));
        if (!r.pairs) {
            for (int64_t i = 0; i < h.layer_count; ++i) store_kv(i, t.projected.data(), a.slots, a.positions, a.rows);
        } else if (a.pairs > 0) {
            prefill_pairs();
        }
    }

  private:
    void project() {
        const int64_t width = r.num_hidden_layers * r.target_width;
        grow(t.concatenated, a.rows * width);
        grow(t.projected, a.rows * h.width);
        for (int64_t row = 0; row < a.rows; ++row) {
            float* const x = &t.concatenated[row * width];
            for (int64_t hidden_layer = 0; hidden_layer < r.num_hidden_layers; ++hidden_layer) {
                float* const part = x + hidden_layer * r.target_width;
                std::memcpy(part, a.target_states[row] + r.column_offsets[hidden_layer], r.target_width * sizeof *part);
                if (r.target_norm != nullptr) k.norm(part, r.target_norm, r.target_eps, r.target_width, part);
                if (r.hidden_layer_norms != nullptr)
                    k.norm(part, r.hidden_layer_norms[hidden_layer], h.eps, r.target_width, part);
            }
            if (r.concat_norm != nullptr) k.norm(x, r.concat_norm, h.eps, width, x);
        }
        if (r.fc_weights != nullptr)
            layers.linear(*r.fc_weights, t.concatenated.data(), a.rows, t.projected.data());
        else
            for (int64_t row = 0; row < a.rows; ++row)
                std::memcpy(&t.projected[row * h.width], &t.concatenated[row * width], h.width * sizeof(float));
        if (r.projected_norm != nullptr)
            for (int64_t row = 0; row < a.rows; ++row) {
                float* const x = &t.projected[row * h.width];
                k.norm(x, r.projected_norm, h.eps, h.width, x);
            }
    }

    void prefill_pairs() {
        if (!layers.tokens_only()) gather_sources();
        layers.read_inputs(a.tokens, t.previous.data(), a.pairs);
        const int64_t last = h.layer_count - 1;
        if (last > 0) run_layers(last);
        store_kv(last, layers.attention_input(last, a.pairs), a.pair_slots, a.pair_positions, a.pairs);
    }

    void gather_sources() {
        grow(t.previous, a.pairs * h.width);
        for (int64_t i = 0; i < a.pairs; ++i)
            std::memcpy(&t.previous[i * h.width], r.hidden_states + a.source_slots[i] * h.width,
                        h.width * sizeof(float));
    }

    // Run all layers but the last, whose output for known tokens is not needed: only its keys and values are.
    void run_layers(int64_t count) {
        std::vector<AttentionSpan> spans;
        layers.add_prefill_spans(a, 0, spans);
        layers.run(spans, a.pair_positions, a.pair_slots, a.pairs, count);
    }

    // Store the keys and values of a layer's input in their slots.
    void store_kv(int64_t index, const float* x, const int64_t* slots, const int64_t* positions, int64_t rows) {
        const Layer& layer = h.layers[index];
        const int64_t size = h.kv_heads * h.head_dim;
        grow(t.keys_values, rows * 2 * size);
        layers.linear(*r.kv_weights[index], x, rows, t.keys_values.data());
        for (int64_t row = 0; row < rows; ++row) {
            float* const keys = &t.keys_values[row * 2 * size];
            const float* const rope_table = layer.rope_table + positions[row] * 2 * h.head_dim;
            for (int64_t head = 0; head < h.kv_heads; ++head) {
                float* const key = keys + head * h.head_dim;
                if (layer.k_norm != nullptr) k.norm(key, layer.k_norm, h.eps, h.head_dim, key);
                k.rotate(key, rope_table, h.head_dim, 1.0f);
            }
            foretell::store_kv(k, h, layer, slots[row], keys);
        }
    }

    Team team;
    Layers layers;
    const Kernels& k;
    const PrefillHead& r;
    const Head& h;
    const HeadPrefill& a;
    PrefillScratch& t;
};

}  // namespace
}  // namespace foretell

FORETELL_API int64_t foretell_head_prefill(
    const foretell::PrefillHead* head, const foretell::HeadPrefill* prefill, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        HeadPrefiller(*head, *prefill, threads, scratch<PrefillScratch>()).run();
        return 0;
    });
}
