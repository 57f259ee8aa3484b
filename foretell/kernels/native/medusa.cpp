// Drafts of Medusa heads: all positions from one hidden state, without returning to Python in between.
#include <cmath>

#include "entry.h"
#include "layers.h"

namespace foretell {

struct Medusa {
    const Weights* const* blocks;   // [heads, layers]
    const Weights* const* outputs;  // of each head, or one for all
    const float* norm;              // the target's final norm, or null
    const int64_t* ids;             // target token of each output; null: the same ids
    int64_t layers, width;
    float eps;
    int32_t level, shared;  // whether there is one output for all
};

struct MedusaDraft {
    const float* hidden_states;  // [sequences, width]
    float* logits;          // [depth, sequences, outputs]
    int64_t* draft_tokens;       // [depth, sequences]; null: only logits
    float* confidences;            // [depth, sequences]
    int64_t sequences, depth;
};

namespace {

struct MedusaScratch {
    AlignedVector<float> states, update;
    QuantizedInputs quantized;
};

class MedusaDrafter {
  public:
    MedusaDrafter(const Medusa& medusa, const MedusaDraft& draft, int threads, MedusaScratch& memory)
        : m(medusa), a(draft), k(kernels_of(medusa.level)), team(threads), t(memory) {}

    void run() {
        const int64_t size = a.sequences * m.width;
        grow(t.states, a.depth * size);
        grow(t.update, size);
        for (int64_t head = 0; head < a.depth; ++head) run_blocks(head, &t.states[head * size]);
        const int64_t outputs = m.outputs[0]->outputs;
        if (m.shared)
            linear(*m.outputs[0], t.states.data(), a.depth * a.sequences, a.logits);
        else
            for (int64_t head = 0; head < a.depth; ++head)
                linear(*m.outputs[head], &t.states[head * size], a.sequences, a.logits + head * a.sequences * outputs);
        for (int64_t at = 0; a.draft_tokens != nullptr && at < a.depth * a.sequences; ++at) {
            int64_t best = 0;
            a.confidences[at] = k.argmax_softmax(a.logits + at * outputs, outputs, &best);
            a.draft_tokens[at] = m.ids == nullptr ? best : m.ids[best];
        }
    }

  private:
    // Compute the states of one head: the target's hidden states plus the output of its residual blocks.
    void run_blocks(int64_t head, float* states) {
        for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
            float* const state = states + sequence * m.width;
            std::memcpy(state, a.hidden_states + sequence * m.width, m.width * sizeof *state);
            if (m.norm != nullptr) k.norm(state, m.norm, m.eps, m.width, state);
        }
        float* const update = t.update.data();
        for (int64_t layer = 0; layer < m.layers; ++layer) {
            linear(*m.blocks[head * m.layers + layer], states, a.sequences, update);
            for (int64_t i = 0; i < a.sequences * m.width; ++i) update[i] /= 1.0f + std::exp(-update[i]);
            k.add(states, update, a.sequences * m.width);
        }
    }

    void linear(const Weights& weights, const float* x, int64_t rows, float* y) {
        multiply(team, weights, t.quantized.quantize(team, weights, x, rows), rows, y);
    }

    const Medusa& m;
    const MedusaDraft& a;
    const Kernels& k;
    Team team;
    MedusaScratch& t;
};

}  // namespace
}  // namespace foretell

FORETELL_API int64_t foretell_draft_medusa(
    const foretell::Medusa* medusa, const foretell::MedusaDraft* draft, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        MedusaDrafter(*medusa, *draft, threads, scratch<MedusaScratch>()).run();
        return 0;
    });
}
