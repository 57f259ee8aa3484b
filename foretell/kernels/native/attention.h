// Attention of a tile of rows with an online softmax. Each row visits the keys of its sequence in order, in blocks that
// are aligned to the start of the sequence, and then merges the results of whole chunks of blocks: the order of
// additions depends on its position alone, not on other rows or on threads.
#pragma once

#include <cstring>

#include "kernels.h"

namespace foretell {
namespace {

constexpr int kQueries = 6;  // queries processed at once
constexpr float kMasked = -1e30f;  // score of a masked key

// The attention of one query to some of its keys, in `state_floats` floats.
struct State {
    float *accumulator, *sums, *maximum;

    State(float* memory, int64_t dim)
        : accumulator(memory), sums(memory + state_floats(dim) - 32), maximum(memory + state_floats(dim) - 16) {}
};

// Working memory of one thread, provided by the caller.
struct AttentionScratch {
    float *keys, *scores, *zeros, *states;  // [dim, kKeys]; [kQueries, kKeys]; [dim]: a padded key; states

    AttentionScratch(float* memory, int64_t dim) {
        const uintptr_t line = (reinterpret_cast<uintptr_t>(memory) + kLine - 1) / kLine * kLine;
        keys = reinterpret_cast<float*>(line);  // aligned: a vector that crosses a line takes two loads
        scores = keys + dim * kKeys;
        zeros = scores + kQueries * kKeys;
        states = zeros + state_floats(dim);
        std::memset(zeros, 0, dim * sizeof *zeros);
    }
};

// A block of keys: the position of the first, their number and their slots.
struct Block {
    int64_t first, count = 0;
    int64_t slots[kKeys];
};

// Rows of keys and values of a block for one KV head.
struct BlockRows {
    const float *keys[kKeys], *values[kKeys];

    BlockRows(const Tile& tile, const Block& block, int64_t head, const float* zeros) {
        for (int64_t i = 0; i < block.count; ++i) {
            const int64_t at = (block.slots[i] * tile.heads + head) * tile.dim;
            keys[i] = tile.keys + at;
            values[i] = tile.values + at;
        }
        for (int64_t i = block.count; i < kKeys; ++i) keys[i] = zeros;
    }
};

// Fetches the rows of a block into the cache, a few cache lines at a time while others are computed with.
class Prefetcher {
  public:
    Prefetcher(const Tile& tile, const Block& next, int64_t head)
        : tile_(tile), next_(next), head_(head), left_(2 * next.count) {}

    FORETELL_INLINE void fetch() {
        if (left_ == 0) return;
        const bool is_key = --left_ >= next_.count;
        const int64_t slot = next_.slots[is_key ? left_ - next_.count : left_];
        const float* const row = (is_key ? tile_.keys : tile_.values) + (slot * tile_.heads + head_) * tile_.dim;
        for (int64_t d = 0; d < tile_.dim; d += kLine / int64_t(sizeof(float))) __builtin_prefetch(row + d, 0, 2);
    }

  private:
    const Tile& tile_;
    const Block& next_;
    const int64_t head_;
    int64_t left_;
};

FORETELL_INLINE int64_t first_visible(const Tile& tile, int64_t row) {
    const int64_t first_key = tile.positions[row] + 1 - tile.window;
    return tile.window == 0 || first_key < tile.skipped ? tile.skipped : first_key;
}

// Return whether a row sees any key from `first` to `stop`.
FORETELL_INLINE bool sees(const Tile& tile, int64_t row, int64_t first, int64_t stop) {
    return tile.positions[row] >= first && first_visible(tile, row) < stop;
}

// Find the slots of up to kKeys keys from `first` to `stop` that a row sees.
FORETELL_INLINE void locate_keys(const Tile& tile, int64_t row, int64_t first, int64_t stop, Block& block) {
    block.first = first;
    block.count = stop - first < kKeys ? stop - first : kKeys;
    int64_t page = first / tile.page_size, at = first % tile.page_size;
    for (int64_t i = 0; i < block.count; ++i) {
        const bool in_tree = tile.tree_slots != nullptr && first + i >= tile.context;
        block.slots[i] = in_tree ? tile.tree_slots[tile.tree_first[row] + first + i - tile.context]
                                 : tile.pages[page] * tile.page_size + at;
        if (++at == tile.page_size && !in_tree) ++page, at = 0;
    }
}

void transpose_keys(const BlockRows& rows, int64_t count, int64_t dim, float* out) {
    count = (count + Lanes::kCount - 1) / Lanes::kCount * Lanes::kCount;  // columns after those are masked
    int64_t at = 0;
    for (; at + Lanes::kCount <= dim; at += Lanes::kCount)
        for (int64_t j = 0; j < count; j += Lanes::kCount)
            Lanes::transpose(rows.keys + j, at, out + at * kKeys + j, kKeys);
    for (; at < dim; ++at)
        for (int64_t j = 0; j < count; ++j) out[at * kKeys + j] = rows.keys[j][at];
}

template <int Q>
void score(const float* const (&queries)[kQueries], const float* keys, int64_t dim, Prefetcher& prefetcher,
           float* scores) {
    constexpr int kWide = Lanes::kAcross * Lanes::kCount;
    for (int part = 0; part < kKeys; part += kWide) {
        V sum[Q][Lanes::kAcross];
        for (int q = 0; q < Q; ++q)
            for (V& each : sum[q]) each = Lanes::zero();
        for (int64_t d = 0; d < dim; ++d) {
            V key[Lanes::kAcross];
            for (int n = 0; n < Lanes::kAcross; ++n) key[n] = Lanes::load(keys + d * kKeys + part + n * Lanes::kCount);
            if (part == 0) prefetcher.fetch();
            for (int q = 0; q < Q; ++q) {
                const V query = Lanes::all(queries[q][d]);
                for (int n = 0; n < Lanes::kAcross; ++n) sum[q][n] = Lanes::fma(query, key[n], sum[q][n]);
            }
        }
        for (int q = 0; q < Q; ++q)
            for (int n = 0; n < Lanes::kAcross; ++n)
                Lanes::store(scores + q * kKeys + part + n * Lanes::kCount, sum[q][n]);
    }
}

// Return exp(before - now), exactly 1 for equal numbers.
FORETELL_INLINE float decay_of(float before, float now) {
    if (before == now) return 1.0f;
    float decays[Lanes::kCount];
    Lanes::store(decays, exponential(Lanes::sub(Lanes::all(before), Lanes::all(now))));
    return decays[0];
}

// Turn scores into weights, 0 before key `begin` and from `end` on. Return the factor by which earlier sums decay.
FORETELL_INLINE float online_softmax(float* scores, int64_t begin, int64_t end, const State& state) {
    const bool full = begin <= 0 && end >= kKeys;
    V highest = Lanes::all(*state.maximum);
    for (int j = 0; j < kKeys; j += Lanes::kCount) {
        V part = Lanes::load(scores + j);
        if (!full) Lanes::store(scores + j, part = Lanes::keep(part, begin - j, end - j, Lanes::all(kMasked)));
        highest = Lanes::max(highest, part);
    }
    const float peak = Lanes::peak(highest), decay = decay_of(*state.maximum, peak);
    *state.maximum = peak;
    const V maximum = Lanes::all(peak);
    V sum = Lanes::mul(Lanes::load(state.sums), Lanes::all(decay));
    for (int j = 0; j < kKeys; j += Lanes::kCount) {
        V part = exponential(Lanes::sub(Lanes::load(scores + j), maximum));
        if (!full) part = Lanes::keep(part, begin - j, end - j, Lanes::zero());
        Lanes::store(scores + j, part);
        sum = Lanes::add(sum, part);
    }
    Lanes::store(state.sums, sum);
    return decay;
}

// Accumulate N whole vectors of the weighted values from column `at` on, or a part of one. Accumulators are `stride`
// floats apart.
template <int Q, int N, bool Whole>
FORETELL_INLINE void accumulate_part(const BlockRows& rows, int64_t from, int64_t to, const float* weights,
                                     const float* decays, int64_t at, int64_t count, Prefetcher& prefetcher,
                                     float* accumulator, int64_t stride) {
    const auto load = [count](const float* x) { return Whole ? Lanes::load(x) : Lanes::load_some(x, count); };
    V sum[Q][N];
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n)
            sum[q][n] = Lanes::mul(load(accumulator + q * stride + at + n * Lanes::kCount), Lanes::all(decays[q]));
    for (int64_t j = from; j < to; ++j) {
        V value[N];
        for (int n = 0; n < N; ++n) value[n] = load(rows.values[j] + at + n * Lanes::kCount);
        if (at == 0) prefetcher.fetch();
        for (int q = 0; q < Q; ++q) {
            const V weight = Lanes::all(weights[q * kKeys + j]);
            for (int n = 0; n < N; ++n) sum[q][n] = Lanes::fma(weight, value[n], sum[q][n]);
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n) {
            float* const out = accumulator + q * stride + at + n * Lanes::kCount;
            Whole ? Lanes::store(out, sum[q][n]) : Lanes::store_some(out, sum[q][n], count);
        }
}

template <int Q>
void accumulate_values(const BlockRows& rows, int64_t from, int64_t to, const float* weights, const float* decays,
                       Prefetcher& prefetcher, float* accumulator, int64_t dim) {
    constexpr int kWide = Lanes::kAcross * Lanes::kCount;
    const int64_t stride = state_floats(dim);
    int64_t at = 0;
    for (; at + kWide <= dim; at += kWide)
        accumulate_part<Q, Lanes::kAcross, true>(rows, from, to, weights, decays, at, kWide, prefetcher, accumulator,
                                                 stride);
    for (; at < dim; at += Lanes::kCount)
        accumulate_part<Q, 1, false>(rows, from, to, weights, decays, at,
                                     dim - at < Lanes::kCount ? dim - at : Lanes::kCount, prefetcher, accumulator,
                                     stride);
}

using Score = void (*)(const float* const (&)[kQueries], const float*, int64_t, Prefetcher&, float*);
using AccumulateValues = void (*)(
    const BlockRows&, int64_t, int64_t, const float*, const float*, Prefetcher&, float*, int64_t);
constexpr Score kScore[kQueries] = {score<1>, score<2>, score<3>, score<4>, score<5>, score<6>};
constexpr AccumulateValues kAccumulate[kQueries] = {accumulate_values<1>, accumulate_values<2>, accumulate_values<3>,
                                                    accumulate_values<4>, accumulate_values<5>, accumulate_values<6>};

// Attends rows of a tile to blocks of keys.
class TileAttention {
  public:
    TileAttention(const Tile& tile, HeadRange heads, float* states, const AttentionScratch& scratch)
        : tile_(tile), heads_(heads), states_(states), scratch_(scratch), stride_(state_floats(tile.dim)) {}

    float* state(int64_t head, int64_t query) const {
        return states_ + ((head - heads_.first) * tile_.rows * tile_.group + query) * stride_;
    }

    // Attend all rows to the keys from `begin` to `end` that they see.
    void attend(int64_t begin, int64_t end) {
        reset();
        int64_t first = end, last = 0;
        for (int64_t row = 0; row < tile_.rows; ++row) {
            const int64_t seen = first_visible(tile_, row);
            first = seen < first ? seen : first;
            last = tile_.positions[row] > last ? tile_.positions[row] : last;
        }
        first = (first > begin ? first : begin) / kKeys * kKeys;
        const int64_t stop = last + 1 < end ? last + 1 : end;
        const int64_t context_end = tile_.tree_slots == nullptr ? stop : tile_.context / kKeys * kKeys;
        const int64_t shared_end = context_end < stop ? context_end : stop;
        if (first < shared_end) locate_keys(tile_, 0, first, shared_end, blocks_[0]);
        int current = 0;
        for (; first < shared_end; first += kKeys, current ^= 1) {
            Block& next = blocks_[current ^ 1];
            next.count = 0;
            if (first + kKeys < shared_end) locate_keys(tile_, 0, first + kKeys, shared_end, next);
            attend_block(0, tile_.rows, blocks_[current], next);
        }
        if (first < stop)
            for (int64_t row = 0; row < tile_.rows; ++row) attend_path(row, first, stop);
    }

  private:
    void reset() {
        for (int64_t i = 0; i < heads_.count * tile_.rows * tile_.group; ++i) {
            const State state(states_ + i * stride_, tile_.dim);
            std::memset(state.accumulator, 0, stride_ * sizeof(float));
            *state.maximum = kMasked;
        }
    }

    // Attend a tree node to the keys from `first` to `stop`, which no other node shares.
    void attend_path(int64_t row, int64_t first, int64_t stop) {
        const int64_t end = tile_.positions[row] + 1;
        blocks_[1].count = 0;
        for (stop = end < stop ? end : stop; first < stop; first += kKeys) {
            locate_keys(tile_, row, first, stop, blocks_[0]);
            attend_block(row, row + 1, blocks_[0], blocks_[1]);
        }
    }

    // Attend rows `row` .. `stop` to a block, except those that see none of its keys.
    void attend_block(int64_t row, int64_t stop, const Block& block, const Block& next) {
        const auto is_masked = [&](int64_t r) { return !sees(tile_, r, block.first, block.first + kKeys); };
        while (row < stop && is_masked(row)) ++row;
        while (row < stop && is_masked(stop - 1)) --stop;
        if (row == stop) return;
        for (int64_t head = heads_.first; head < heads_.first + heads_.count; ++head) {
            const BlockRows rows(tile_, block, head, scratch_.zeros);
            Prefetcher prefetcher(tile_, next, head);
            transpose_keys(rows, block.count, tile_.dim, scratch_.keys);
            int64_t at = row * tile_.group;
            for (int64_t left = stop * tile_.group - at, rounds = ceil_div(left, kQueries); rounds > 0; --rounds) {
                const int64_t count = ceil_div(left, rounds);
                attend_queries(block, rows, head, at, count, prefetcher);
                at += count;
                left -= count;
            }
        }
    }

    // Attend queries `first` .. `first + count` of a head to a block.
    void attend_queries(const Block& block, const BlockRows& rows, int64_t head, int64_t first, int64_t count,
                        Prefetcher& prefetcher) {
        const float* queries[kQueries] = {};
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = (first + i) / tile_.group, query = head * tile_.group + (first + i) % tile_.group;
            queries[i] = tile_.queries + row * tile_.row_stride + query * tile_.dim;
        }
        kScore[count - 1](queries, scratch_.keys, tile_.dim, prefetcher, scratch_.scores);
        float decays[kQueries];
        int64_t from = kKeys, to = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = (first + i) / tile_.group;
            const int64_t begin = first_visible(tile_, row) - block.first, end = tile_.positions[row] + 1 - block.first;
            from = begin < from ? begin : from;
            to = end > to ? end : to;
            decays[i] = online_softmax(scratch_.scores + i * kKeys, begin, end, State(state(head, first + i), tile_.dim));
        }
        kAccumulate[count - 1](rows, from < 0 ? 0 : from, to < block.count ? to : block.count, scratch_.scores, decays,
                               prefetcher, state(head, first), tile_.dim);
    }

    const Tile& tile_;
    const HeadRange heads_;
    float* const states_;
    const AttentionScratch scratch_;
    const int64_t stride_;
    Block blocks_[2];
};

// Call f(head, row, query) for each query of some heads.
template <class F>
FORETELL_INLINE void for_queries(const Tile& tile, HeadRange heads, const F& f) {
    for (int64_t head = heads.first; head < heads.first + heads.count; ++head)
        for (int64_t query = 0; query < tile.rows * tile.group; ++query) f(head, query / tile.group, query);
}

// Add the state of a chunk to that of the chunks before it.
void merge(float* to, float* from, int64_t dim) {
    const State sum(to, dim), more(from, dim);
    const float peak = *more.maximum > *sum.maximum ? *more.maximum : *sum.maximum;
    const V before = Lanes::all(decay_of(*sum.maximum, peak)), after = Lanes::all(decay_of(*more.maximum, peak));
    *sum.maximum = peak;
    for (float *x = to, *y = from; x < sum.maximum; x += Lanes::kCount, y += Lanes::kCount)
        Lanes::store(x, Lanes::fma(Lanes::load(y), after, Lanes::mul(Lanes::load(x), before)));
}

// Store the attention of a query: the weighted values over the sum of weights.
void normalize(const Tile& tile, int64_t head, int64_t query, float* memory) {
    const State state(memory, tile.dim);
    const int64_t column = (head * tile.group + query % tile.group) * tile.dim;
    float* const out = tile.out + query / tile.group * tile.out_stride + column;
    const V total = Lanes::all(Lanes::sum(Lanes::load(state.sums)));
    by_lanes(tile.dim, [&](int64_t at, int64_t count) {
        Lanes::store_some(out + at, Lanes::div(Lanes::load_some(state.accumulator + at, count), total), count);
    });
}

void attend_chunk(const Tile& tile, HeadRange heads, int64_t chunk, float* states, float* memory) {
    const AttentionScratch scratch(memory, tile.dim);
    TileAttention(tile, heads, states, scratch).attend(chunk * kChunk, (chunk + 1) * kChunk);
}

void attend_all(const Tile& tile, HeadRange heads, float* memory) {
    const AttentionScratch scratch(memory, tile.dim);
    const int64_t size = state_floats(tile.dim), states = heads.count * tile.rows * tile.group * size;
    TileAttention sums(tile, heads, scratch.states, scratch), chunk(tile, heads, scratch.states + states, scratch);
    const ChunkRange range = chunks_of(tile);
    sums.attend(range.first * kChunk, (range.first + 1) * kChunk);
    for (int64_t i = range.first + 1; i < range.stop; ++i) {
        chunk.attend(i * kChunk, (i + 1) * kChunk);
        for_queries(tile, heads, [&](int64_t head, int64_t row, int64_t query) {
            if (!sees(tile, row, i * kChunk, (i + 1) * kChunk)) return;
            if (first_visible(tile, row) >= i * kChunk)
                std::memcpy(sums.state(head, query), chunk.state(head, query), size * sizeof(float));
            else
                merge(sums.state(head, query), chunk.state(head, query), tile.dim);
        });
    }
    for_queries(tile, heads, [&](int64_t head, int64_t, int64_t query) {
        normalize(tile, head, query, sums.state(head, query));
    });
}

void merge_chunks(const Tile& tile, HeadRange heads, float* states, int64_t stride) {
    const ChunkRange range = chunks_of(tile);
    const int64_t size = state_floats(tile.dim);
    for_queries(tile, heads, [&](int64_t head, int64_t row, int64_t query) {
        float *const first = states + (head * tile.rows * tile.group + query) * size, *sum = nullptr;
        for (int64_t i = range.first; i < range.stop; ++i) {
            float* const chunk = first + (i - range.first) * stride;
            if (!sees(tile, row, i * kChunk, (i + 1) * kChunk)) continue;
            if (sum == nullptr)
                sum = chunk;
            else
                merge(sum, chunk, tile.dim);
        }
        normalize(tile, head, query, sum == nullptr ? first : sum);
    });
}

constexpr AttentionKernels attend{attend_all, attend_chunk, merge_chunks};

}  // namespace
}  // namespace foretell
