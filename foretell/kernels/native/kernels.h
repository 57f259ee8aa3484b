// Types shared by the library. The reference definitions of the operations are in foretell/kernels/*.py.
#pragma once

#include <cstdint>

namespace foretell {

constexpr int kBlock = 32;  // outputs that are packed and computed together
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kStep = 4;    // consecutive inputs of one output in memory
constexpr int kKeys = 64;   // keys of an attention block
constexpr int64_t kChunk = 512;  // keys of an attention chunk, a multiple of kKeys; chunks are attended to separately
constexpr int kLine = 64;   // bytes of a cache line
constexpr int kScaleBytes = kBlock * 2;  // bfloat16 scales of an int4 block in one group
constexpr int kInt8GroupBytes = kBlock * kGroup;
constexpr int kInt4GroupBytes = kScaleBytes + kBlock * kGroup / 2;

// A matrix [outputs, inputs], `WeightsRecord` in Python. Integers are padded to blocks and groups, floats to blocks.
struct Weights {
    int64_t inputs, outputs;
    const uint8_t* packed;
    const float* scales;  // int8: one per output; those of int4 weights are interleaved with the values
    const float* bias;    // or null
    int32_t bits;         // 32 (float32), 8 or 4
    int32_t level;        // instruction set; see `foretell_best_level`
};

// The left operand of a matrix product.
struct Rows {
    const float* x;          // [rows, inputs] for float32 weights; the fields below for others
    const int8_t* values;    // [rows, groups, kGroup]
    const float* scales;     // [rows, groups]
    const int32_t* offsets;  // [rows, groups]: corrects the excess of the products of a group; see `kExcess8`
    int64_t groups;          // float32: the number of inputs
    const int16_t* wide_pairs;  // int8 with AVX2: the values in 16 bits, each four in the order 0, 2, 1, 3; or null
    bool reuses_weights = false;  // the weights are read again soon, so they are kept in L2 and L3
};

// Weights are stored with this excess to be unsigned: the instructions multiply unsigned by signed bytes.
constexpr int32_t kExcess8 = 128, kExcess4 = 8;

// Data types of the KV cache, `KV_TYPES` in Python.
enum KVType : int32_t { kFloat32, kBfloat16, kFloat16, kInt8, kKVTypes };

struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// Return the bytes of one key or value of a head. An int8 one ends with its scale, a float.
inline int64_t kv_bytes(int32_t type, int64_t dim) {
    return type == kFloat32 ? 4 * dim : type == kInt8 ? dim + int64_t(sizeof(float)) : 2 * dim;
}

// Rows of one sequence, for attention.
struct Tile {
    const float* queries;  // of the first row, rotated and scaled by `query_scale`; those of a KV head are adjacent
    int64_t row_stride, rows, heads, group, dim;  // heads: KV heads; group: query heads per KV head
    const int64_t* positions;  // of the rows
    const uint8_t *keys, *values;  // [slots, heads] of `kv_bytes` each
    const int64_t* pages;
    int64_t page_size;
    int64_t window;  // sliding window, the row itself included; 0: none
    int64_t skipped;  // keys at the start of the sequence that are masked for all rows
    // Tree nodes share the keys up to `context`; then row r sees slots tree_slots[tree_first[r] ..]. Null: a chain.
    const int64_t *tree_slots, *tree_first;
    int64_t context;
    float* out;
    int64_t out_stride;
};

// Return the factor of queries for a factor of attention scores: attention takes powers of two.
inline float query_scale(float scale) { return scale * 1.44269504f; }

// A range of KV heads.
struct HeadRange {
    int64_t first, count;
};

// A range of chunks of keys.
struct ChunkRange {
    int64_t first, stop;
};

// Attention of a tile. A row's bits are the same whether its chunks are attended to at once or one by one.
struct AttentionKernels {
    // Attend to all keys; `attend_scratch_floats` floats of scratch.
    void (*attend)(const Tile& tile, HeadRange heads, float* scratch);
    // Attend to some chunks of keys, into states [heads.count, rows * group] of each, `state_floats` floats per state.
    // Chunks are `stride` floats apart.
    void (*attend_chunks)(
        const Tile& tile, HeadRange heads, ChunkRange chunks, float* states, int64_t stride, float* scratch);
    // Merge the states of all chunks, [tile.heads, rows * group] each, and store the output of some heads.
    void (*merge_chunks)(const Tile& tile, HeadRange heads, float* states, int64_t stride);
};

// Multiply rows `first` .. `stop` by one block of outputs, into y [rows, outputs].
using Product = void (*)(
    const Weights& weights, const Rows& rows, int64_t first, int64_t stop, int64_t block, float* y);

// The operations, implemented for one instruction set.
struct Kernels {
    // Quantize one row x [inputs] into values, scales and offsets of `Rows`.
    void (*quantize)(
        const float* x, int64_t inputs, int32_t excess, int8_t* values, float* scales, int32_t* offsets);
    Product int8, int4, float32;
    void (*norm)(const float* x, const float* weight, float eps, int64_t width, float* y);
    void (*add)(float* x, const float* more, int64_t width);
    // Apply RoPE to x [dim] with a row of the table (cosines, then sines with the first half negated), then scale.
    void (*rotate)(float* x, const float* table, int64_t dim, float scale);
    void (*glu)(const float* gate_up, int64_t width, bool gelu, float* y);
    const AttentionKernels* attend;  // by KVType
    // Convert a key or value of one head.
    void (*store_kv)(const float* x, int64_t dim, int32_t type, uint8_t* out);
    // Store the argmax of x [width], the first of equals, and return its softmax probability.
    float (*argmax_softmax)(const float* x, int64_t width, int64_t* at);
};

extern const Kernels portable_kernels, avx2_kernels, vnni_kernels;

// 2: AVX-512 with VNNI; 1: AVX2 and FMA; 0: neither.
const Kernels& kernels_of(int32_t level);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Return the chunks of keys that the rows of a tile see.
inline ChunkRange chunks_of(const Tile& tile) {
    int64_t first = tile.positions[0], last = first;
    for (int64_t row = 1; row < tile.rows; ++row) {
        first = tile.positions[row] < first ? tile.positions[row] : first;
        last = tile.positions[row] > last ? tile.positions[row] : last;
    }
    first = tile.window == 0 || first + 1 - tile.window < tile.skipped ? tile.skipped : first + 1 - tile.window;
    return ChunkRange{first / kChunk, last / kChunk + 1};
}

// Return the floats of the attention of one query to a part of its keys: weighted values, sums of weights, maximum.
inline int64_t state_floats(int64_t dim) {
    constexpr int64_t most_lanes = 16;
    return ceil_div(dim, most_lanes) * most_lanes + 2 * most_lanes;
}

// Return the floats of working memory that `AttentionKernels` need for some queries of each of some KV heads.
inline int64_t attend_scratch_floats(int64_t heads, int64_t queries, int64_t dim) {
    constexpr int64_t most_queries = 8;  // processed at once
    return (dim + most_queries) * kKeys + state_floats(dim) + kLine + 2 * heads * queries * state_floats(dim);
}

inline int64_t valid_outputs(const Weights& weights, int64_t block) {
    const int64_t left = weights.outputs - block * kBlock;
    return left < kBlock ? left : kBlock;
}

}  // namespace foretell
