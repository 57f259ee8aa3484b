// Attention of a tile of rows with an online softmax. Each row visits the keys of its sequence in order, in blocks that
// are aligned to the start of the sequence: the order of additions depends on its position alone, not on other rows.
#pragma once

#include "kernels.h"

namespace foretell {
namespace {

constexpr int kQueries = 6;  // queries processed at once
constexpr float kMasked = -1e30f;  // score of a masked key

// Working memory of one thread, provided by the caller.
struct AttentionScratch {
    float* keys;     // [dim, kKeys]
    float* scores;   // [queries, kKeys]
    float* sums;     // [queries, lanes]
    float* accumulator;  // [queries, dim]
    float* maxima;   // [queries]
    float* decays;   // [queries]: factor of earlier sums after a new maximum
    float* zeros;    // [dim]: the key of a padded column

    AttentionScratch(float* memory, int64_t queries, int64_t dim) {
        keys = memory;
        scores = keys + dim * kKeys;
        sums = scores + queries * kKeys;
        accumulator = sums + queries * Lanes::kCount;
        zeros = accumulator + queries * dim;
        maxima = zeros + dim;
        decays = maxima + queries;
        for (float* at = sums; at < maxima; ++at) *at = 0.0f;
        for (int64_t i = 0; i < queries; ++i) maxima[i] = kMasked;
    }
};

// A block of keys: the position of the first, their number and their addresses.
struct Block {
    int64_t first, count;
    const float *keys[kKeys], *values[kKeys];
};

FORETELL_INLINE int64_t first_visible(const Tile& tile, int64_t row) {
    const int64_t first_key = tile.positions[row] + 1 - tile.window;
    return tile.window == 0 || first_key < tile.skipped ? tile.skipped : first_key;
}

FORETELL_INLINE void locate_keys(const Tile& tile, int64_t row, int64_t first, int64_t stop,
                                 const AttentionScratch& scratch, Block& block) {
    block.first = first;
    block.count = (stop - first < kKeys ? stop - first : kKeys);
    int64_t page = first / tile.page_size, at = first % tile.page_size;
    for (int64_t i = 0; i < block.count; ++i) {
        const bool in_tree = tile.tree_slots != nullptr && first + i >= tile.context;
        const int64_t slot = in_tree ? tile.tree_slots[tile.tree_first[row] + first + i - tile.context]
                                     : tile.pages[page] * tile.page_size + at;
        block.keys[i] = tile.keys + slot * tile.slot_stride;
        block.values[i] = tile.values + slot * tile.slot_stride;
        if (++at == tile.page_size && !in_tree) ++page, at = 0;
    }
    for (int64_t i = block.count; i < kKeys; ++i) block.keys[i] = scratch.zeros;
}

// Keys and values are strided, which the hardware prefetcher does not predict: prefetch the next block.
FORETELL_INLINE void prefetch_keys(const Tile& tile, int64_t first, int64_t stop) {
    stop = first + kKeys < stop ? first + kKeys : stop;
    int64_t page = first / tile.page_size, at = first % tile.page_size;
    for (; first < stop; ++first) {
        const int64_t offset = (tile.pages[page] * tile.page_size + at) * tile.slot_stride;
        for (int64_t d = 0; d < tile.dim; d += kLine / int64_t(sizeof(float))) {
            __builtin_prefetch(tile.keys + offset + d, 0, 2);
            __builtin_prefetch(tile.values + offset + d, 0, 2);
        }
        if (++at == tile.page_size) ++page, at = 0;
    }
}

void transpose_keys(const Block& block, int64_t dim, float* out) {
    int64_t at = 0;
    for (; at + Lanes::kCount <= dim; at += Lanes::kCount)
        for (int j = 0; j < kKeys; j += Lanes::kCount)
            Lanes::transpose(block.keys + j, at, out + at * kKeys + j, kKeys);
    for (; at < dim; ++at)
        for (int j = 0; j < kKeys; ++j) out[at * kKeys + j] = block.keys[j][at];
}

template <int Q>
void score(const float* const (&queries)[kQueries], const float* keys, int64_t dim, float* scores) {
    for (int part = 0; part < kKeys; part += 2 * Lanes::kCount) {
        V sum[Q][2];
        for (int q = 0; q < Q; ++q) sum[q][0] = sum[q][1] = Lanes::zero();
        for (int64_t d = 0; d < dim; ++d) {
            const V k0 = Lanes::load(keys + d * kKeys + part), k1 = Lanes::load(keys + d * kKeys + part + Lanes::kCount);
            for (int q = 0; q < Q; ++q) {
                const V query = Lanes::all(queries[q][d]);
                sum[q][0] = Lanes::fma(query, k0, sum[q][0]);
                sum[q][1] = Lanes::fma(query, k1, sum[q][1]);
            }
        }
        for (int q = 0; q < Q; ++q) {
            Lanes::store(scores + q * kKeys + part, sum[q][0]);
            Lanes::store(scores + q * kKeys + part + Lanes::kCount, sum[q][1]);
        }
    }
}

// Turn scores into weights, 0 before key `begin` and from `end` on. Return the factor by which earlier sums decay.
FORETELL_INLINE float online_softmax(float* scores, int64_t begin, int64_t end, float* peak, float* sums) {
    const bool full = begin <= 0 && end >= kKeys;
    V highest = Lanes::all(*peak);
    for (int j = 0; j < kKeys; j += Lanes::kCount) {
        V part = Lanes::load(scores + j);
        if (!full) Lanes::store(scores + j, part = Lanes::keep(part, begin - j, end - j, Lanes::all(kMasked)));
        highest = Lanes::max(highest, part);
    }
    const float before = *peak;
    *peak = Lanes::peak(highest);
    const V maximum = Lanes::all(*peak), decay = exponential(Lanes::sub(Lanes::all(before), maximum));
    V sum = Lanes::mul(Lanes::load(sums), decay);
    for (int j = 0; j < kKeys; j += Lanes::kCount) {
        V part = exponential(Lanes::sub(Lanes::load(scores + j), maximum));
        if (!full) part = Lanes::keep(part, begin - j, end - j, Lanes::zero());
        Lanes::store(scores + j, part);
        sum = Lanes::add(sum, part);
    }
    Lanes::store(sums, sum);
    float decays[Lanes::kCount];
    Lanes::store(decays, decay);
    return decays[0];
}

// Accumulate N vectors of the weighted values from column `at` on.
template <int Q, int N>
FORETELL_INLINE void accumulate_part(const Block& block, int64_t from, const float* weights, const float* decays,
                                     int64_t at, int64_t count, float* accumulator, int64_t dim) {
    V sum[Q][N];
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n) {
            float* const to = accumulator + q * dim + at + n * Lanes::kCount;
            sum[q][n] = Lanes::mul(Lanes::load_some(to, count - n * Lanes::kCount), Lanes::all(decays[q]));
        }
    for (int64_t j = from; j < block.count; ++j) {
        V value[N];
        for (int n = 0; n < N; ++n)
            value[n] = Lanes::load_some(block.values[j] + at + n * Lanes::kCount, count - n * Lanes::kCount);
        for (int q = 0; q < Q; ++q) {
            const V weight = Lanes::all(weights[q * kKeys + j]);
            for (int n = 0; n < N; ++n) sum[q][n] = Lanes::fma(weight, value[n], sum[q][n]);
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n) {
            const int64_t left = count - n * Lanes::kCount;
            Lanes::store_some(accumulator + q * dim + at + n * Lanes::kCount, sum[q][n], left);
        }
}

template <int Q>
void accumulate_values(const Block& block, int64_t from, const float* weights, const float* decays, float* accumulator,
                       int64_t dim) {
    constexpr int kWide = Lanes::kAcross * Lanes::kCount;
    int64_t at = 0;
    for (; at + kWide <= dim; at += kWide)
        accumulate_part<Q, Lanes::kAcross>(block, from, weights, decays, at, kWide, accumulator, dim);
    for (; at + Lanes::kCount <= dim; at += Lanes::kCount)
        accumulate_part<Q, 1>(block, from, weights, decays, at, Lanes::kCount, accumulator, dim);
    if (at < dim) accumulate_part<Q, 1>(block, from, weights, decays, at, dim - at, accumulator, dim);
}

using Score = void (*)(const float* const (&)[kQueries], const float*, int64_t, float*);
using AccumulateValues = void (*)(const Block&, int64_t, const float*, const float*, float*, int64_t);
constexpr Score kScore[kQueries] = {score<1>, score<2>, score<3>, score<4>, score<5>, score<6>};
constexpr AccumulateValues kAccumulate[kQueries] = {accumulate_values<1>, accumulate_values<2>, accumulate_values<3>,
                                                    accumulate_values<4>, accumulate_values<5>, accumulate_values<6>};

// Attend queries `first` .. `first + count` of the tile to a block.
void attend_queries(const Tile& tile, const Block& block, int64_t first, int64_t count, AttentionScratch& scratch) {
    const float* queries[kQueries] = {};
    for (int64_t i = 0; i < count; ++i)
        queries[i] = tile.queries + (first + i) / tile.group * tile.row_stride + (first + i) % tile.group * tile.dim;
    float* const scores = &scratch.scores[first * kKeys];
    kScore[count - 1](queries, scratch.keys, tile.dim, scores);
    int64_t from = kKeys;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (first + i) / tile.group;
        const int64_t begin = first_visible(tile, row) - block.first, end = tile.positions[row] + 1 - block.first;
        from = begin < from ? begin : from;
        float* const sums = &scratch.sums[(first + i) * Lanes::kCount];
        scratch.decays[first + i] = online_softmax(scores + i * kKeys, begin, end, &scratch.maxima[first + i], sums);
    }
    float* const accumulator = &scratch.accumulator[first * tile.dim];
    kAccumulate[count - 1](block, from < 0 ? 0 : from, scores, &scratch.decays[first], accumulator, tile.dim);
}

// Attend rows `row` .. `stop` to the block that starts with key `first`, except those for which it is masked.
void attend_block(const Tile& tile, int64_t row, int64_t stop, int64_t first, AttentionScratch& scratch) {
    const auto is_masked = [&](int64_t r) {
        return tile.positions[r] < first || first_visible(tile, r) >= first + kKeys;
    };
    while (row < stop && is_masked(row)) ++row;
    while (row < stop && is_masked(stop - 1)) --stop;
    if (row == stop) return;
    int64_t last = 0;
    for (int64_t r = row; r < stop; ++r) last = tile.positions[r] > last ? tile.positions[r] : last;
    Block block;
    locate_keys(tile, row, first, last + 1, scratch, block);
    transpose_keys(block, tile.dim, scratch.keys);
    int64_t at = row * tile.group;
    for (int64_t left = stop * tile.group - at, rounds = ceil_div(left, kQueries); rounds > 0; --rounds) {
        const int64_t count = ceil_div(left, rounds);
        attend_queries(tile, block, at, count, scratch);
        at += count;
        left -= count;
    }
}

void normalize(const Tile& tile, const AttentionScratch& scratch) {
    for (int64_t query = 0; query < tile.rows * tile.group; ++query) {
        float* const out = tile.out + query / tile.group * tile.out_stride + query % tile.group * tile.dim;
        const V total = Lanes::all(Lanes::sum(Lanes::load(&scratch.sums[query * Lanes::kCount])));
        const float* const accumulator = &scratch.accumulator[query * tile.dim];
        by_lanes(tile.dim, [&](int64_t at, int64_t count) {
            Lanes::store_some(out + at, Lanes::div(Lanes::load_some(accumulator + at, count), total), count);
        });
    }
}

void attend(const Tile& tile, float* memory) {
    AttentionScratch scratch(memory, tile.rows * tile.group, tile.dim);
    int64_t first_key = tile.positions[0], last = 0;
    for (int64_t row = 0; row < tile.rows; ++row) {
        const int64_t seen = first_visible(tile, row);
        first_key = seen < first_key ? seen : first_key;
        last = tile.positions[row] > last ? tile.positions[row] : last;
    }
    const int64_t context_end = tile.tree_slots == nullptr ? last + 1 : tile.context / kKeys * kKeys;
    for (int64_t first = first_key / kKeys * kKeys; first < context_end; first += kKeys) {
        prefetch_keys(tile, first + kKeys, context_end);
        attend_block(tile, 0, tile.rows, first, scratch);
    }
    if (tile.tree_slots != nullptr)
        for (int64_t row = 0; row < tile.rows; ++row)
            for (int64_t first = context_end; first <= tile.positions[row]; first += kKeys)
                attend_block(tile, row, row + 1, first, scratch);
    normalize(tile, scratch);
}

}  // namespace
}  // namespace foretell
