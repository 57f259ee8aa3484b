// Guesses of Medusa heads: all places ahead from one state, without a return to Python in between.
#include <cmath>

#include "entry.h"
#include "layers.h"

namespace foretell {

struct Medusa {
    const Weights* const* blocks;   // [heads, layers]
    const Weights* const* outputs;  // of each head, or one for all
    const float* norm;              // before all else, or null
    const int64_t* ids;             // the target's token for each output; null: the same
    int64_t layers, width;
    float eps;
    int32_t level, shared;  // whether there is one output for all
};

struct MedusaRows {
    const float* features;  // [texts, width]
    float* logits;          // [depth, texts, outputs]
    int64_t* guesses;       // [depth, texts]; null: the logits are wanted
    float* sure;            // [depth, texts]
    int64_t texts, depth;
};

namespace {

struct MedusaRoom {
    std::vector<float> states, added;
    Quantized quantized;
};

class MedusaRun {
  public:
    MedusaRun(const Medusa& medusa, const MedusaRows& rows, int threads, MedusaRoom& room)
        : m(medusa), a(rows), k(kernels_of(medusa.level)), team(threads), t(room) {}

    void whole() {
        const int64_t size = a.texts * m.width;
        grow(t.states, a.depth * size);
        grow(t.added, size);
        for (int64_t head = 0; head < a.depth; ++head) through(head, &t.states[head * size]);
        const int64_t outputs = m.outputs[0]->outputs;
        if (m.shared)
            linear(*m.outputs[0], t.states.data(), a.depth * a.texts, a.logits);
        else
            for (int64_t head = 0; head < a.depth; ++head)
                linear(*m.outputs[head], &t.states[head * size], a.texts, a.logits + head * a.texts * outputs);
        for (int64_t at = 0; a.guesses != nullptr && at < a.depth * a.texts; ++at) {
            int64_t best = 0;
            a.sure[at] = k.best(a.logits + at * outputs, outputs, &best);
            a.guesses[at] = m.ids == nullptr ? best : m.ids[best];
        }
    }

  private:
    // A head's own state of each text: what its blocks add to the target's.
    void through(int64_t head, float* states) {
        for (int64_t text = 0; text < a.texts; ++text) {
            float* const state = states + text * m.width;
            std::memcpy(state, a.features + text * m.width, m.width * sizeof *state);
            if (m.norm != nullptr) k.norm(state, m.norm, m.eps, m.width, state);
        }
        float* const added = t.added.data();
        for (int64_t layer = 0; layer < m.layers; ++layer) {
            linear(*m.blocks[head * m.layers + layer], states, a.texts, added);
            for (int64_t i = 0; i < a.texts * m.width; ++i) added[i] /= 1.0f + std::exp(-added[i]);
            k.add(states, added, a.texts * m.width);
        }
    }

    void linear(const Weights& weights, const float* x, int64_t rows, float* y) {
        multiply(team, weights, t.quantized.of(team, weights, x, rows), rows, y);
    }

    const Medusa& m;
    const MedusaRows& a;
    const Kernels& k;
    Team team;
    MedusaRoom& t;
};

}  // namespace
}  // namespace foretell

FORETELL_API int64_t foretell_medusa(const foretell::Medusa* medusa, const foretell::MedusaRows* rows, int threads) {
    using namespace foretell;
    return entry([&]() -> int64_t {
        MedusaRun(*medusa, *rows, threads, scratch<MedusaRoom>()).whole();
        return 0;
    });
}
