// Drafts of a head, token by token or a block at once, without returning to Python in between.
#include "head.h"

#include <cmath>

#include "entry.h"
#include "layers.h"

namespace foretell {
namespace {

// The stopping rule of a chain: its depth and the probability of the path so far, never of tokens to come.
struct DraftLimit {
    int64_t left;
    float min_prob, path_prob = 1.0f;

    bool advance(float confidence) {
        path_prob *= confidence;
        return --left > 0 && path_prob >= min_prob;
    }
};

int64_t id_of(const Head& head, int64_t output) { return head.ids == nullptr ? output : head.ids[output]; }

int64_t slot_of(const Head& head, const int64_t* pages, int64_t position) {
    return pages[position / head.page_size] * head.page_size + position % head.page_size;
}

class ChainDrafter {
  public:
    ChainDrafter(const Head& head, const DraftChain& chain, int threads, HeadScratch& memory)
        : team(threads), layers(head, team, memory), h(head), c(chain), tokens(c.tokens, c.tokens + c.rows),
          positions(c.positions, c.positions + c.rows), slots(c.rows), chosen(c.rows), logits(c.logits) {
        if (c.prefill != nullptr) add_prefill(*c.prefill);
        layers.reserve(int64_t(tokens.size()));
        if (logits == nullptr) {
            grow(memory.logits, c.rows * h.output->outputs);
            logits = memory.logits.data();
        }
        for (int64_t row = 0; row < c.rows; ++row) {
            rows.push_back(row);
            limits.push_back(DraftLimit{c.depths[row], c.min_probs[row]});
        }
    }

    int64_t run() {
        for (int64_t depth = 0;; ++depth) {
            step();
            if (c.draft_tokens == nullptr) return 1;
            choose_outputs(depth);
            emit(depth);
            if (rows.empty()) return depth + 1;
        }
    }

  private:
    // Rows to prefill follow the sequences' own in the first step, which attends to them.
    void add_prefill(const HeadPrefill& added) {
        tokens.insert(tokens.end(), added.tokens, added.tokens + added.pairs);
        positions.insert(positions.end(), added.pair_positions, added.pair_positions + added.pairs);
        slots.insert(slots.end(), added.pair_slots, added.pair_slots + added.pairs);
        layers.add_prefill_spans(added, c.rows, spans);
    }

    // Run one step. Rows that continue are at the front of tokens, positions and hidden states.
    void step() {
        const int64_t count = int64_t(rows.size());
        const int64_t num_rows = spans.empty() ? count : int64_t(tokens.size());
        for (int64_t i = 0; i < count; ++i) {
            const int64_t* const pages = c.pages + c.first_pages[rows[i]];
            const int64_t* const path = c.tree_slots == nullptr ? nullptr : c.tree_slots + i * c.tree_slot_count;
            slots[i] = path == nullptr ? slot_of(h, pages, positions[i]) : path[c.tree_slot_count - 1];
            // Position 0 has no hidden state before it, so its key is masked.
            spans.push_back(AttentionSpan{i, 1, pages, &positions[i], h.layers[0].window, 1, path,
                                          path == nullptr ? 0 : positions[i] + 1 - c.tree_slot_count});
        }
        layers.read_inputs(tokens.data(), c.hidden_states, num_rows);
        layers.run(spans, positions.data(), slots.data(), num_rows, h.layer_count);
        spans.clear();
        layers.final_norm(count);
        layers.linear(*h.output, layers.t.normed.data(), count, logits);
        const AlignedVector<float>& next = h.norm_output ? layers.t.normed : layers.t.states;
        if (c.hidden_states != nullptr) std::memcpy(c.hidden_states, next.data(), count * h.width * sizeof(float));
    }

    // Choose an output for each row, and its confidence.
    void choose_outputs(int64_t depth) {
        team.each(int64_t(rows.size()), [&](int64_t i) {
            const int64_t row = rows[i], outputs = h.output->outputs;
            const float* const scores = logits + i * outputs;
            float* const probs = c.probs == nullptr ? nullptr : c.probs + (row * c.depth + depth) * c.vocab;
            const SamplingParams* const params = c.sampling == nullptr ? nullptr : c.sampling + depth * c.rows + row;
            float* const confidence = c.confidences + depth * c.rows + row;
            if (params != nullptr && params->temperature > 0) {
                *confidence = sample_token(scores, outputs, h.ids, *params, probs, &chosen[row]);
            } else {
                *confidence = layers.k.argmax_softmax(scores, outputs, &chosen[row]);
                if (probs != nullptr) probs[id_of(h, chosen[row])] = 1;
            }
        });
    }

    // Store the draft tokens and keep the rows that continue.
    void emit(int64_t depth) {
        int64_t* const draft_tokens = c.draft_tokens + depth * c.rows;
        std::fill(draft_tokens, draft_tokens + c.rows, -1);
        size_t kept = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
            const int64_t row = rows[i];
            draft_tokens[row] = id_of(h, chosen[row]);
            if (!limits[row].advance(c.confidences[depth * c.rows + row])) continue;
            rows[kept] = row;
            tokens[kept] = draft_tokens[row];
            positions[kept] = positions[i] + 1;
            if (c.hidden_states != nullptr)
                std::memmove(c.hidden_states + kept * h.width, c.hidden_states + i * h.width, h.width * sizeof(float));
            ++kept;
        }
        rows.resize(kept);
    }

    Team team;
    Layers layers;
    const Head& h;
    const DraftChain& c;
    std::vector<int64_t> rows, tokens, positions, slots, chosen;
    float* logits;
    std::vector<DraftLimit> limits;
    std::vector<AttentionSpan> spans;
};

class BlockDrafter {
  public:
    BlockDrafter(const BlockHead& block, const BlockDraft& request, int threads, HeadScratch& memory)
        : team(threads), layers(block.head, team, memory), b(block), h(block.head), a(request) {
        layers.reserve(a.sequences * b.rows);
    }

    int64_t run() {
        prepare_rows();
        layers.run(spans, positions.data(), slots.data(), a.sequences * b.rows, h.layer_count);
        layers.final_norm(a.sequences * b.rows);
        std::memcpy(a.states, layers.t.normed.data(), a.sequences * b.rows * h.width * sizeof(float));
        const int64_t first = b.from_anchor ? 0 : 1;
        for (int64_t sequence = 0; sequence < a.sequences; ++sequence)
            layers.linear(*h.output, a.states + (sequence * b.rows + first) * h.width, a.depth,
                          a.logits + sequence * a.depth * h.output->outputs);
        return a.draft_tokens == nullptr ? a.depth : emit();
    }

  private:
    // Set up the anchor and the masked positions after it. Their keys and values go to scratch slots.
    void prepare_rows() {
        const int64_t rows = b.rows;
        last_visible.reserve(a.sequences * rows);
        for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
            const int64_t position = a.positions[sequence];
            for (int64_t row = 0; row < rows; ++row) {
                float* const state = &layers.t.states[(sequence * rows + row) * h.width];
                if (row == 0 || b.anchored) layers.embed(a.tokens[sequence], state);
                if (row > 0 && b.anchored) layers.k.add(state, b.masks + (row - 1) * h.width, h.width);
                if (row > 0 && !b.anchored)
                    std::memcpy(state, b.masks + (row - 1) * h.width, h.width * sizeof *state);
                positions.push_back(position + row);
                last_visible.push_back(b.causal ? position + row : position + rows - 1);
                slots.push_back(b.scratch_slots + sequence * rows + row);
            }
        }
        for (int64_t sequence = 0; sequence < a.sequences; ++sequence)
            spans.push_back(AttentionSpan{sequence * rows, rows, a.pages + a.first_pages[sequence],
                                          &last_visible[sequence * rows], 0, 0, &slots[sequence * rows],
                                          a.positions[sequence]});
    }

    int64_t emit() {
        std::vector<int64_t> before(a.tokens, a.tokens + a.sequences);
        std::vector<DraftLimit> limits;
        for (int64_t sequence = 0; sequence < a.sequences; ++sequence)
            limits.push_back(DraftLimit{std::min(a.depths[sequence], a.depth), a.min_probs[sequence]});
        std::fill(a.draft_tokens, a.draft_tokens + a.depth * a.sequences, -1);
        int64_t depth = 0;
        for (bool any = true; any; ++depth) {
            any = false;
            for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
                if (before[sequence] < 0) continue;
                const int64_t index = depth * a.sequences + sequence;
                emit(sequence, depth, before[sequence], a.draft_tokens + index, a.confidences + index);
                const bool on = limits[sequence].advance(a.confidences[index]);
                before[sequence] = on ? a.draft_tokens[index] : -1;
                any |= on;
            }
        }
        return depth;
    }

    void emit(int64_t sequence, int64_t depth, int64_t before, int64_t* token, float* token_confidence) {
        const float* const markov = b.markov_in == nullptr ? nullptr : b.markov_in + before * b.rank;
        float* const logits = a.logits + (sequence * a.depth + depth) * h.output->outputs;
        if (markov != nullptr) {
            grow(markov_logits, h.output->outputs);
            layers.linear(*b.markov_out, markov, 1, markov_logits.data());
            layers.k.add(logits, markov_logits.data(), h.output->outputs);
        }
        int64_t best = 0;
        const float prob = layers.k.argmax_softmax(logits, h.output->outputs, &best);
        *token = id_of(h, best);
        *token_confidence = b.confidence == nullptr ? prob : confidence(sequence, depth, markov);
    }

    // Return the output of the confidence head: the acceptance probability of a draft token.
    float confidence(int64_t sequence, int64_t depth, const float* markov) const {
        const float* const state = a.states + (sequence * b.rows + depth + (b.from_anchor ? 0 : 1)) * h.width;
        float sum = b.confidence_bias;
        for (int64_t i = 0; i < h.width; ++i) sum += state[i] * b.confidence[i];
        for (int64_t i = 0; i < b.confidence_rank; ++i) sum += markov[i] * b.confidence[h.width + i];
        return 1.0f / (1.0f + std::exp(-sum));
    }

    Team team;
    Layers layers;
    const BlockHead& b;
    const Head& h;
    const BlockDraft& a;
    std::vector<int64_t> positions, slots, last_visible;
    std::vector<AttentionSpan> spans;
    AlignedVector<float> markov_logits;
};

}  // namespace
}  // namespace foretell

// Return the number of draft tokens of the longest row.
FORETELL_API int64_t foretell_draft_chain(const foretell::Head* head, const foretell::DraftChain* chain, int threads) {
    using namespace foretell;
    return entry([&] { return ChainDrafter(*head, *chain, threads, scratch<HeadScratch>()).run(); });
}

FORETELL_API int64_t foretell_draft_blocks(
    const foretell::BlockHead* block, const foretell::BlockDraft* request, int threads) {
    using namespace foretell;
    return entry([&] { return BlockDrafter(*block, *request, threads, scratch<HeadScratch>()).run(); });
}
