// Attention of a tile of rows. Each row meets the keys of its own text in order, in blocks that begin with the text:
// what it adds up, and in which order, depends on its position alone, not on the rows or pages it came with.
#pragma once

#include "kernels.h"

namespace foretell {
namespace {

constexpr int kQueries = 6;  // worked on at once
constexpr float kHidden = -1e30f;

// Where one thread keeps what it works out, in memory of the caller's.
struct Work {
    float* keys;     // [dim, kKeys]
    float* scores;   // [queries, kKeys]
    float* sums;     // [queries, lanes]
    float* mixed;    // [queries, dim]
    float* peaks;    // [queries]
    float* shrinks;  // [queries]: what a higher peak makes of the sums so far
    float* none;     // [dim] zeros: a key where there is none

    Work(float* room, int64_t queries, int64_t dim) {
        keys = room;
        scores = keys + dim * kKeys;
        sums = scores + queries * kKeys;
        mixed = sums + queries * Lanes::kCount;
        none = mixed + queries * dim;
        peaks = none + dim;
        shrinks = peaks + queries;
        for (float* at = sums; at < peaks; ++at) *at = 0.0f;
        for (int64_t i = 0; i < queries; ++i) peaks[i] = kHidden;
    }
};

// One block of keys: how many there are, where they lie, and the logical place of the first.
struct Block {
    int64_t first, count;
    const float *keys[kKeys], *values[kKeys];
};

FORETELL_INLINE int64_t least_seen(const Tile& tile, int64_t row) {
    const int64_t least = tile.positions[row] + 1 - tile.window;
    return tile.window == 0 || least < tile.hidden ? tile.hidden : least;
}

FORETELL_INLINE void find(const Tile& tile, int64_t row, int64_t first, int64_t stop, const Work& work, Block& block) {
    block.first = first;
    block.count = (stop - first < kKeys ? stop - first : kKeys);
    int64_t page = first / tile.page_size, at = first % tile.page_size;
    for (int64_t i = 0; i < block.count; ++i) {
        const bool own = tile.own != nullptr && first + i >= tile.shared;
        const int64_t slot =
            own ? tile.own[tile.own_first[row] + first + i - tile.shared] : tile.pages[page] * tile.page_size + at;
        block.keys[i] = tile.keys + slot * tile.slot_stride;
        block.values[i] = tile.values + slot * tile.slot_stride;
        if (++at == tile.page_size && !own) ++page, at = 0;
    }
    for (int64_t i = block.count; i < kKeys; ++i) block.keys[i] = work.none;
}

// Rows of keys and values lie apart, so the processor does not guess where the next ones are: fetch them meanwhile.
FORETELL_INLINE void fetch_from(const Tile& tile, int64_t first, int64_t stop) {
    stop = first + kKeys < stop ? first + kKeys : stop;
    int64_t page = first / tile.page_size, at = first % tile.page_size;
    for (; first < stop; ++first) {
        const int64_t place = (tile.pages[page] * tile.page_size + at) * tile.slot_stride;
        for (int64_t d = 0; d < tile.dim; d += kLine / int64_t(sizeof(float))) {
            __builtin_prefetch(tile.keys + place + d, 0, 2);
            __builtin_prefetch(tile.values + place + d, 0, 2);
        }
        if (++at == tile.page_size) ++page, at = 0;
    }
}

void lay_across(const Block& block, int64_t dim, float* out) {
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

// Scores become weights; keys before `begin` and from `end` on get none. The sums so far shrink by what is returned.
FORETELL_INLINE float weigh(float* scores, int64_t begin, int64_t end, float* peak, float* sums) {
    const bool whole = begin <= 0 && end >= kKeys;
    V highest = Lanes::all(*peak);
    for (int j = 0; j < kKeys; j += Lanes::kCount) {
        V part = Lanes::load(scores + j);
        if (!whole) Lanes::store(scores + j, part = Lanes::keep(part, begin - j, end - j, Lanes::all(kHidden)));
        highest = Lanes::max(highest, part);
    }
    const float before = *peak;
    *peak = Lanes::peak(highest);
    const V now = Lanes::all(*peak), shrink = exponential(Lanes::sub(Lanes::all(before), now));
    V sum = Lanes::mul(Lanes::load(sums), shrink);
    for (int j = 0; j < kKeys; j += Lanes::kCount) {
        V part = exponential(Lanes::sub(Lanes::load(scores + j), now));
        if (!whole) part = Lanes::keep(part, begin - j, end - j, Lanes::zero());
        Lanes::store(scores + j, part);
        sum = Lanes::add(sum, part);
    }
    Lanes::store(sums, sum);
    float factor[Lanes::kCount];
    Lanes::store(factor, shrink);
    return factor[0];
}

// N vectors of the values from `at` on, weighted and added to what is there.
template <int Q, int N>
FORETELL_INLINE void mix_part(const Block& block, int64_t from, const float* weights, const float* shrinks, int64_t at,
                              int64_t count, float* mixed, int64_t dim) {
    V sum[Q][N];
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n) {
            float* const to = mixed + q * dim + at + n * Lanes::kCount;
            sum[q][n] = Lanes::mul(Lanes::load_some(to, count - n * Lanes::kCount), Lanes::all(shrinks[q]));
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
            Lanes::store_some(mixed + q * dim + at + n * Lanes::kCount, sum[q][n], left);
        }
}

template <int Q>
void mix(const Block& block, int64_t from, const float* weights, const float* shrinks, float* mixed, int64_t dim) {
    constexpr int kWide = Lanes::kAcross * Lanes::kCount;
    int64_t at = 0;
    for (; at + kWide <= dim; at += kWide)
        mix_part<Q, Lanes::kAcross>(block, from, weights, shrinks, at, kWide, mixed, dim);
    for (; at + Lanes::kCount <= dim; at += Lanes::kCount)
        mix_part<Q, 1>(block, from, weights, shrinks, at, Lanes::kCount, mixed, dim);
    if (at < dim) mix_part<Q, 1>(block, from, weights, shrinks, at, dim - at, mixed, dim);
}

using Score = void (*)(const float* const (&)[kQueries], const float*, int64_t, float*);
using Mix = void (*)(const Block&, int64_t, const float*, const float*, float*, int64_t);
constexpr Score kScore[kQueries] = {score<1>, score<2>, score<3>, score<4>, score<5>, score<6>};
constexpr Mix kMix[kQueries] = {mix<1>, mix<2>, mix<3>, mix<4>, mix<5>, mix<6>};

// Queries `first` .. `first + count` of the tile meet a block.
void meet_some(const Tile& tile, const Block& block, int64_t first, int64_t count, Work& work) {
    const float* queries[kQueries] = {};
    for (int64_t i = 0; i < count; ++i)
        queries[i] = tile.queries + (first + i) / tile.share * tile.row_stride + (first + i) % tile.share * tile.dim;
    float* const scores = &work.scores[first * kKeys];
    kScore[count - 1](queries, work.keys, tile.dim, scores);
    int64_t from = kKeys;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (first + i) / tile.share;
        const int64_t begin = least_seen(tile, row) - block.first, end = tile.positions[row] + 1 - block.first;
        from = begin < from ? begin : from;
        float* const sums = &work.sums[(first + i) * Lanes::kCount];
        work.shrinks[first + i] = weigh(scores + i * kKeys, begin, end, &work.peaks[first + i], sums);
    }
    kMix[count - 1](block, from < 0 ? 0 : from, scores, &work.shrinks[first], &work.mixed[first * tile.dim], tile.dim);
}

// Rows `row` .. `stop` meet the block that begins with key `first`; those that see nothing of it would not change.
void meet(const Tile& tile, int64_t row, int64_t stop, int64_t first, Work& work) {
    const auto blind = [&](int64_t r) {
        return tile.positions[r] < first || least_seen(tile, r) >= first + kKeys;
    };
    while (row < stop && blind(row)) ++row;
    while (row < stop && blind(stop - 1)) --stop;
    if (row == stop) return;
    int64_t last = 0;
    for (int64_t r = row; r < stop; ++r) last = tile.positions[r] > last ? tile.positions[r] : last;
    Block block;
    find(tile, row, first, last + 1, work, block);
    lay_across(block, tile.dim, work.keys);
    int64_t at = row * tile.share;
    for (int64_t left = stop * tile.share - at, turns = up(left, kQueries); turns > 0; --turns) {
        const int64_t now = up(left, turns);
        meet_some(tile, block, at, now, work);
        at += now;
        left -= now;
    }
}

void finish(const Tile& tile, const Work& work) {
    for (int64_t query = 0; query < tile.rows * tile.share; ++query) {
        float* const out = tile.out + query / tile.share * tile.out_stride + query % tile.share * tile.dim;
        const V whole = Lanes::all(Lanes::sum(Lanes::load(&work.sums[query * Lanes::kCount])));
        const float* const mixed = &work.mixed[query * tile.dim];
        by_lanes(tile.dim, [&](int64_t at, int64_t count) {
            Lanes::store_some(out + at, Lanes::div(Lanes::load_some(mixed + at, count), whole), count);
        });
    }
}

void attend(const Tile& tile, float* room) {
    Work work(room, tile.rows * tile.share, tile.dim);
    int64_t least = tile.positions[0], last = 0;
    for (int64_t row = 0; row < tile.rows; ++row) {
        const int64_t seen = least_seen(tile, row);
        least = seen < least ? seen : least;
        last = tile.positions[row] > last ? tile.positions[row] : last;
    }
    const int64_t common = tile.own == nullptr ? last + 1 : tile.shared / kKeys * kKeys;
    for (int64_t first = least / kKeys * kKeys; first < common; first += kKeys) {
        fetch_from(tile, first + kKeys, common);
        meet(tile, 0, tile.rows, first, work);
    }
    if (tile.own != nullptr)
        for (int64_t row = 0; row < tile.rows; ++row)
            for (int64_t first = common; first <= tile.positions[row]; first += kKeys)
                meet(tile, row, row + 1, first, work);
    finish(tile, work);
}

}  // namespace
}  // namespace foretell
