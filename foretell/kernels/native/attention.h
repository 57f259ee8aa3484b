// Attention of a tile of rows with an online softmax. Each row visits the keys of its sequence in order, in blocks that
// are aligned to the start of the sequence, and then merges the results of whole chunks of blocks: the order of
// additions depends on its position alone, not on other rows or on threads.
#pragma once

#include <cstring>

#include "attention_keys.h"
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

// Return 2^x for x <= 0: exactly 1 for 0, about 1e-38 for very low x.
FORETELL_INLINE V power_of_two(V x) {
    const V rounder = Lanes::all(12582912.0f);  // 1.5 * 2^23: a sum with it rounds to an integer
    x = Lanes::max(x, Lanes::all(-126.0f));
    const V rounded = Lanes::add(x, rounder), rest = Lanes::sub(x, Lanes::sub(rounded, rounder));
    // Minimax polynomial for -0.5 .. 0.5.
    V y = Lanes::all(1.535336188319500e-4f);
    y = Lanes::fma(y, rest, Lanes::all(1.339887440266574e-3f));
    y = Lanes::fma(y, rest, Lanes::all(9.618437357674640e-3f));
    y = Lanes::fma(y, rest, Lanes::all(5.550332471162809e-2f));
    y = Lanes::fma(y, rest, Lanes::all(2.402264791363012e-1f));
    y = Lanes::fma(y, rest, Lanes::all(6.931472028550421e-1f));
    y = Lanes::fma(y, rest, Lanes::all(1.0f));
    return Lanes::mul(y, Lanes::power_of_rounded(rounded));
}

// Return 2^(before - now), exactly 1 for equal numbers.
FORETELL_INLINE float decay_of(float before, float now) {
    if (before == now) return 1.0f;
    float decays[Lanes::kCount];
    Lanes::store(decays, power_of_two(Lanes::sub(Lanes::all(before), Lanes::all(now))));
    return decays[0];
}

// The keys of a block that a query sees.
struct Visible {
    int64_t begin, end;

    bool all() const { return begin <= 0 && end >= kKeys; }
};

// Scale and mask scores; return the highest one of a visible key, or `highest`.
template <class T>
FORETELL_INLINE float mask_scores(const BlockRows<T>& rows, Visible visible, float highest, float* scores) {
    V peaks = Lanes::all(highest);
    for (int j = 0; j < kKeys; j += Lanes::kCount) {
        V part = Lanes::load(scores + j);
        if constexpr (kScaled<T>) part = Lanes::mul(part, Lanes::load(rows.key_scales + j));
        if (!visible.all()) part = Lanes::keep(part, visible.begin - j, visible.end - j, Lanes::all(kMasked));
        if (kScaled<T> || !visible.all()) Lanes::store(scores + j, part);
        peaks = Lanes::max(peaks, part);
    }
    return Lanes::peak(peaks);
}

// Turn scores into weights, 0 for keys that are not visible, and add them to `sums`, which decay first. Then multiply
// them by the scales of the values.
template <class T>
FORETELL_INLINE void exponentiate(const BlockRows<T>& rows, Visible visible, float peak, float decay, float* scores,
                                  float* sums) {
    const V maximum = Lanes::all(peak);
    V sum = Lanes::mul(Lanes::load(sums), Lanes::all(decay));
    for (int j = 0; j < kKeys; j += Lanes::kCount) {
        V part = power_of_two(Lanes::sub(Lanes::load(scores + j), maximum));
        if (!visible.all()) part = Lanes::keep(part, visible.begin - j, visible.end - j, Lanes::zero());
        sum = Lanes::add(sum, part);
        if constexpr (kScaled<T>) part = Lanes::mul(part, Lanes::load(rows.value_scales + j));
        Lanes::store(scores + j, part);
    }
    Lanes::store(sums, sum);
}

// Accumulate N whole vectors of the weighted values from column `at` on, or a part of one. Accumulators are `stride`
// floats apart.
template <class T, int Q, int N, bool Whole>
FORETELL_INLINE void accumulate_part(const BlockRows<T>& rows, int64_t from, int64_t to, const float* weights,
                                     const float* decays, int64_t at, int64_t count, Prefetcher& prefetcher,
                                     float* accumulator, int64_t stride) {
    const auto load = [count](const auto* x) { return Whole ? Lanes::load(x) : load_some(x, count); };
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

template <class T, int Q>
void accumulate_values(const BlockRows<T>& rows, int64_t from, int64_t to, const float* weights, const float* decays,
                       Prefetcher& prefetcher, float* accumulator, int64_t dim) {
    constexpr int kWide = Lanes::kAcross * Lanes::kCount;
    const int64_t stride = state_floats(dim);
    int64_t at = 0;
    for (; at + kWide <= dim; at += kWide)
        accumulate_part<T, Q, Lanes::kAcross, true>(rows, from, to, weights, decays, at, kWide, prefetcher, accumulator,
                                                 stride);
    for (; at < dim; at += Lanes::kCount)
        accumulate_part<T, Q, 1, false>(rows, from, to, weights, decays, at,
                                     dim - at < Lanes::kCount ? dim - at : Lanes::kCount, prefetcher, accumulator,
                                     stride);
}

using Score = void (*)(const float* const (&)[kQueries], const float*, int64_t, Prefetcher&, float*);
constexpr Score kScore[kQueries] = {score<1>, score<2>, score<3>, score<4>, score<5>, score<6>};

template <class T>
struct Accumulate {
    using Values = void (*)(
        const BlockRows<T>&, int64_t, int64_t, const float*, const float*, Prefetcher&, float*, int64_t);
    static constexpr Values values[kQueries] = {accumulate_values<T, 1>, accumulate_values<T, 2>,
                                                accumulate_values<T, 3>, accumulate_values<T, 4>,
                                                accumulate_values<T, 5>, accumulate_values<T, 6>};
};

// Attends rows of a tile to blocks of keys of a `KVType`, whose numbers are T.
template <int32_t Type, class T>
class TileAttention {
  public:
    TileAttention(const Tile& tile, HeadRange heads, float* states, const AttentionScratch& scratch)
        : tile_(tile), heads_(heads), states_(states), scratch_(scratch), stride_(state_floats(tile.dim)),
          row_bytes_(kv_bytes(Type, tile.dim)) {}

    float* state(int64_t head, int64_t query) const {
        return states_ + ((head - heads_.first) * tile_.rows * tile_.group + query) * stride_;
    }

    // Attend all rows to the keys from `begin` to `end` that they see. Those up to `fetch_end` are attended to next.
    void attend(int64_t begin, int64_t end, int64_t fetch_end) {
        reset();
        int64_t first = end, last = 0;
        for (int64_t row = 0; row < tile_.rows; ++row) {
            const int64_t seen = first_visible(tile_, row);
            first = seen < first ? seen : first;
            last = tile_.positions[row] > last ? tile_.positions[row] : last;
        }
        first = (first > begin ? first : begin) / kKeys * kKeys;
        const int64_t stop = min(last + 1, end);
        const int64_t context_end = tile_.tree_slots == nullptr ? last + 1 : tile_.context / kKeys * kKeys;
        const int64_t shared_end = min(context_end, stop);
        fetch_end = min(fetch_end, context_end);
        if (first < shared_end) locate_keys(tile_, 0, first, shared_end, blocks_[0]);
        int current = 0;
        for (; first < shared_end; first += kKeys, current ^= 1) {
            Block& next = blocks_[current ^ 1];
            next.count = 0;
            if (first + kKeys < fetch_end) locate_keys(tile_, 0, first + kKeys, fetch_end, next);
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
        for (stop = min(end, stop); first < stop; first += kKeys) {
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
            const BlockRows<T> rows(tile_, block, head, row_bytes_, scratch_.zeros);
            int64_t at = row * tile_.group, left = stop * tile_.group - at, rounds = ceil_div(left, kQueries);
            Prefetcher prefetcher(tile_, next, head, row_bytes_, rounds * (tile_.dim + kKeys));
            transpose_keys(rows, block.count, tile_.dim, scratch_.keys);
            for (; rounds > 0; --rounds) {
                const int64_t count = ceil_div(left, rounds);
                attend_queries(block, rows, head, at, count, prefetcher);
                at += count;
                left -= count;
            }
        }
    }

    // Attend queries `first` .. `first + count` of a head to a block.
    void attend_queries(const Block& block, const BlockRows<T>& rows, int64_t head, int64_t first, int64_t count,
                        Prefetcher& prefetcher) {
        const float* queries[kQueries] = {};
        Visible visible[kQueries];
        int64_t row = first / tile_.group, column = first % tile_.group, from = kKeys, to = 0;
        for (int64_t i = 0; i < count; ++i) {
            queries[i] = tile_.queries + row * tile_.row_stride + (head * tile_.group + column) * tile_.dim;
            visible[i] = Visible{first_visible(tile_, row) - block.first, tile_.positions[row] + 1 - block.first};
            from = min(visible[i].begin, from);
            to = visible[i].end > to ? visible[i].end : to;
            if (++column == tile_.group) ++row, column = 0;
        }
        float* const scores = scratch_.scores;
        kScore[count - 1](queries, scratch_.keys, tile_.dim, prefetcher, scores);
        // Two loops, so that the processor overlaps the long chains of instructions of several queries.
        float decays[kQueries], peaks[kQueries], *const states = state(head, first);
        for (int64_t i = 0; i < count; ++i)
            peaks[i] = mask_scores(rows, visible[i], *State(states + i * stride_, tile_.dim).maximum, scores + i * kKeys);
        for (int64_t i = 0; i < count; ++i) {
            const State sums(states + i * stride_, tile_.dim);
            decays[i] = decay_of(*sums.maximum, peaks[i]);
            *sums.maximum = peaks[i];
            exponentiate(rows, visible[i], peaks[i], decays[i], scores + i * kKeys, sums.sums);
        }
        Accumulate<T>::values[count - 1](rows, from < 0 ? 0 : from, min(to, block.count), scores, decays, prefetcher,
                                         states, tile_.dim);
    }

    const Tile& tile_;
    const HeadRange heads_;
    float* const states_;
    const AttentionScratch scratch_;
    const int64_t stride_, row_bytes_;
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

template <int32_t Type, class T>
void attend_chunks(const Tile& tile, HeadRange heads, ChunkRange chunks, float* states, int64_t stride, float* memory) {
    const AttentionScratch scratch(memory, tile.dim);
    for (int64_t i = chunks.first; i < chunks.stop; ++i, states += stride)
        TileAttention<Type, T>(tile, heads, states, scratch).attend(i * kChunk, (i + 1) * kChunk, chunks.stop * kChunk);
}

template <int32_t Type, class T>
void attend_all(const Tile& tile, HeadRange heads, float* memory) {
    const AttentionScratch scratch(memory, tile.dim);
    const int64_t size = state_floats(tile.dim), states = heads.count * tile.rows * tile.group * size;
    TileAttention<Type, T> sums(tile, heads, scratch.states, scratch);
    TileAttention<Type, T> chunk(tile, heads, scratch.states + states, scratch);
    const ChunkRange range = chunks_of(tile);
    sums.attend(range.first * kChunk, (range.first + 1) * kChunk, range.stop * kChunk);
    for (int64_t i = range.first + 1; i < range.stop; ++i) {
        chunk.attend(i * kChunk, (i + 1) * kChunk, range.stop * kChunk);
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

template <int32_t Type, class T>
constexpr AttentionKernels attention_of() {
    return {attend_all<Type, T>, attend_chunks<Type, T>, merge_chunks};
}

constexpr AttentionKernels attend[kKVTypes] = {attention_of<kFloat32, float>(), attention_of<kBfloat16, Bfloat16>(),
                                               attention_of<kFloat16, Float16>(), attention_of<kInt8, int8_t>()};

}  // namespace
}  // namespace foretell
