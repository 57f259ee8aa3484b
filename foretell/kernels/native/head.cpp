// Guesses of a head, one after another or a block at once, without a return to Python in between.
#include "head.h"

#include <cmath>

#include "entry.h"
#include "layers.h"

namespace foretell {
namespace {

// A chain goes on while it is asked for and likely enough to stand: by what was guessed before, never by what is to come.
struct Going {
    int64_t left;
    float floor, chance = 1.0f;

    bool after(float sure) {
        chance *= sure;
        return --left > 0 && chance >= floor;
    }
};

int64_t id_of(const Head& head, int64_t output) { return head.ids == nullptr ? output : head.ids[output]; }

int64_t slot_of(const Head& head, const int64_t* pages, int64_t place) {
    return pages[place / head.page_size] * head.page_size + place % head.page_size;
}

class ChainRun {
  public:
    ChainRun(const Head& head, const Chain& chain, int threads, HeadRoom& room)
        : team(threads), layers(head, team, room), h(head), c(chain), tokens(c.tokens, c.tokens + c.rows),
          places(c.places, c.places + c.rows), slots(c.rows), bests(c.rows), logits(c.logits) {
        if (c.along != nullptr) read_along(*c.along);
        layers.fit(int64_t(tokens.size()));
        if (logits == nullptr) {
            grow(room.logits, c.rows * h.output->outputs);
            logits = room.logits.data();
        }
        for (int64_t row = 0; row < c.rows; ++row) {
            rows.push_back(row);
            going.push_back(Going{c.depths[row], c.floors[row]});
        }
    }

    int64_t whole() {
        for (int64_t depth = 0;; ++depth) {
            step();
            if (c.guesses == nullptr) return 1;
            pick(depth);
            guess(depth);
            if (rows.empty()) return depth + 1;
        }
    }

  private:
    // Places that are read stand behind the texts' own in the first step, and are seen in it.
    void read_along(const Reading& reading) {
        tokens.insert(tokens.end(), reading.tokens, reading.tokens + reading.pairs);
        places.insert(places.end(), reading.at, reading.at + reading.pairs);
        slots.insert(slots.end(), reading.own, reading.own + reading.pairs);
        layers.see(reading, c.rows, seen);
    }

    // Those that go on stand in front, in tokens, places and features alike.
    void step() {
        const int64_t count = int64_t(rows.size());
        const int64_t read = seen.empty() ? count : int64_t(tokens.size());
        for (int64_t i = 0; i < count; ++i) {
            const int64_t* const pages = c.pages + c.first_pages[rows[i]];
            const int64_t* const branch = c.branches == nullptr ? nullptr : c.branches + i * c.branch;
            slots[i] = branch == nullptr ? slot_of(h, pages, places[i]) : branch[c.branch - 1];
            // The first place of a text has no feature before it: nobody sees it.
            seen.push_back(Seen{i, 1, pages, &places[i], h.layers[0].window, 1, branch,
                                branch == nullptr ? 0 : places[i] + 1 - c.branch});
        }
        layers.read(tokens.data(), c.features, read);
        layers.run(seen, places.data(), slots.data(), read, h.layer_count);
        seen.clear();
        layers.finish(count);
        layers.linear(*h.output, layers.t.normed.data(), count, logits);
        const std::vector<float>& next = h.norm_output ? layers.t.normed : layers.t.states;
        if (c.features != nullptr) std::memcpy(c.features, next.data(), count * h.width * sizeof(float));
    }

    // Which output each row takes, and how sure it is of it.
    void pick(int64_t depth) {
        team.each(int64_t(rows.size()), [&](int64_t i) {
            const int64_t row = rows[i], outputs = h.output->outputs;
            const float* const scores = logits + i * outputs;
            float* const probs = c.probs == nullptr ? nullptr : c.probs + (row * c.depth + depth) * c.vocab;
            const Draw* const draw = c.draws == nullptr ? nullptr : c.draws + depth * c.rows + row;
            float* const sure = c.sure + depth * c.rows + row;
            if (draw != nullptr && draw->temperature > 0) {
                *sure = draw_among(scores, outputs, h.ids, *draw, probs, &bests[row]);
            } else {
                *sure = layers.k.best(scores, outputs, &bests[row]);
                if (probs != nullptr) probs[id_of(h, bests[row])] = 1;
            }
        });
    }

    void guess(int64_t depth) {
        int64_t* const guesses = c.guesses + depth * c.rows;
        std::fill(guesses, guesses + c.rows, -1);
        size_t kept = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
            const int64_t row = rows[i];
            guesses[row] = id_of(h, bests[row]);
            if (!going[row].after(c.sure[depth * c.rows + row])) continue;
            rows[kept] = row;
            tokens[kept] = guesses[row];
            places[kept] = places[i] + 1;
            if (c.features != nullptr)
                std::memmove(c.features + kept * h.width, c.features + i * h.width, h.width * sizeof(float));
            ++kept;
        }
        rows.resize(kept);
    }

    Team team;
    Layers layers;
    const Head& h;
    const Chain& c;
    std::vector<int64_t> rows, tokens, places, slots, bests;
    float* logits;
    std::vector<Going> going;
    std::vector<Seen> seen;
};

class BlockRun {
  public:
    BlockRun(const BlockHead& block, const BlockChain& asked, int threads, HeadRoom& room)
        : team(threads), layers(block.head, team, room), b(block), h(block.head), a(asked) {
        layers.fit(a.texts * b.rows);
    }

    int64_t whole() {
        fill();
        layers.run(seen, places.data(), slots.data(), a.texts * b.rows, h.layer_count);
        layers.finish(a.texts * b.rows);
        std::memcpy(a.states, layers.t.normed.data(), a.texts * b.rows * h.width * sizeof(float));
        const int64_t first = b.from_anchor ? 0 : 1;
        for (int64_t text = 0; text < a.texts; ++text)
            layers.linear(*h.output, a.states + (text * b.rows + first) * h.width, a.depth,
                          a.logits + text * a.depth * h.output->outputs);
        return a.guesses == nullptr ? a.depth : guess();
    }

  private:
    // The anchor and the places behind it; their keys and values go to spare slots, and are dropped after this.
    void fill() {
        const int64_t rows = b.rows;
        sees.reserve(a.texts * rows);
        for (int64_t text = 0; text < a.texts; ++text) {
            const int64_t place = a.places[text];
            for (int64_t row = 0; row < rows; ++row) {
                float* const state = &layers.t.states[(text * rows + row) * h.width];
                if (row == 0 || b.anchored) layers.embed(a.tokens[text], state);
                if (row > 0 && b.anchored) layers.k.add(state, b.masks + (row - 1) * h.width, h.width);
                if (row > 0 && !b.anchored)
                    std::memcpy(state, b.masks + (row - 1) * h.width, h.width * sizeof *state);
                places.push_back(place + row);
                sees.push_back(b.causal ? place + row : place + rows - 1);
                slots.push_back(b.spare + text * rows + row);
            }
        }
        for (int64_t text = 0; text < a.texts; ++text)
            seen.push_back(Seen{text * rows, rows, a.pages + a.first_pages[text], &sees[text * rows], 0,
                                0, &slots[text * rows], a.places[text]});
    }

    int64_t guess() {
        std::vector<int64_t> before(a.tokens, a.tokens + a.texts);
        std::vector<Going> going;
        for (int64_t text = 0; text < a.texts; ++text)
            going.push_back(Going{std::min(a.depths[text], a.depth), a.floors[text]});
        std::fill(a.guesses, a.guesses + a.depth * a.texts, -1);
        int64_t depth = 0;
        for (bool any = true; any; ++depth) {
            any = false;
            for (int64_t text = 0; text < a.texts; ++text) {
                if (before[text] < 0) continue;
                const int64_t at = depth * a.texts + text;
                guess(text, depth, before[text], a.guesses + at, a.sure + at);
                const bool on = going[text].after(a.sure[at]);
                before[text] = on ? a.guesses[at] : -1;
                any |= on;
            }
        }
        return depth;
    }

    void guess(int64_t text, int64_t depth, int64_t before, int64_t* token, float* sure) {
        const float* const markov = b.markov_in == nullptr ? nullptr : b.markov_in + before * b.rank;
        float* const logits = a.logits + (text * a.depth + depth) * h.output->outputs;
        if (markov != nullptr) {
            grow(nudge, h.output->outputs);
            layers.linear(*b.markov_out, markov, 1, nudge.data());
            layers.k.add(logits, nudge.data(), h.output->outputs);
        }
        int64_t best = 0;
        const float share = layers.k.best(logits, h.output->outputs, &best);
        *token = id_of(h, best);
        *sure = b.surety == nullptr ? share : surety(text, depth, markov);
    }

    // How likely the guess is to stand, as the head itself has it.
    float surety(int64_t text, int64_t depth, const float* markov) const {
        const float* const state = a.states + (text * b.rows + depth + (b.from_anchor ? 0 : 1)) * h.width;
        float sum = b.surety_bias;
        for (int64_t i = 0; i < h.width; ++i) sum += state[i] * b.surety[i];
        for (int64_t i = 0; i < b.surety_rank; ++i) sum += markov[i] * b.surety[h.width + i];
        return 1.0f / (1.0f + std::exp(-sum));
    }

    Team team;
    Layers layers;
    const BlockHead& b;
    const Head& h;
    const BlockChain& a;
    std::vector<int64_t> places, slots, sees;
    std::vector<Seen> seen;
    std::vector<float> nudge;
};

}  // namespace
}  // namespace foretell

// How many guesses were made for the longest row.
FORETELL_API int64_t foretell_chain(const foretell::Head* head, const foretell::Chain* chain, int threads) {
    using namespace foretell;
    return entry([&] { return ChainRun(*head, *chain, threads, scratch<HeadRoom>()).whole(); });
}

FORETELL_API int64_t foretell_blocks(const foretell::BlockHead* block, const foretell::BlockChain* asked, int threads) {
    using namespace foretell;
    return entry([&] { return BlockRun(*block, *asked, threads, scratch<HeadRoom>()).whole(); });
}
