// A model and one step of it; foretell/kernels/native/records.py has the same fields.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace foretell {

struct Layer {
    const Weights *qkv, *out, *gate_up, *down;
    const float *attention_norm, *ffn_norm;  // or null
    const float *q_norm, *k_norm;  // or null
    const float *attention_post_norm, *ffn_post_norm;  // or null
    const float* rope_table;  // [context, 2, head_dim]
    uint8_t *keys, *values;  // [slots, kv_heads] of `kv_bytes` each
    int64_t window;  // 0: none
    const float* query_scales;  // [context], factors of the queries at each position; or null
};

struct Model {
    const Layer* layers;
    const Weights* head;
    const float *embed, *norm;
    int64_t layer_count, width, heads, kv_heads, head_dim, ffn, page_size;
    int64_t first_token, tokens;  // range of tokens whose embeddings are on this rank
    int64_t full_qk_norm;  // 1: `q_norm` and `k_norm` are over all heads together
    float eps, scale, embed_scale, residual_scale;
    int32_t gelu, level;
    int32_t kv_type;  // a `KVType`
};

// The rows of one sequence. Tree nodes are its last rows; a chain has none.
struct Span {
    int64_t first, rows, start, first_page, nodes, first_parent;
};

// Sum `numbers` over all ranks in place; return whether that succeeded.
using AllReduce = bool (*)(float* numbers, int64_t count);

struct Step {
    const int64_t *tokens, *positions, *slots;  // [rows]
    const Span* spans;
    const int64_t *pages, *parents;  // of all spans
    const int64_t* logit_rows;  // rows whose logits are computed, ascending
    const int64_t* hidden_layers;  // numbers of layers after which hidden states are stored
    float* logits;  // [logit_rows, vocab]
    float* hidden_states;  // [rows, hidden_layers, width]
    int64_t* argmax;  // [logit_rows]
    int64_t rows, span_count, logit_row_count, hidden_layer_count;
    AllReduce all_reduce;  // null: no tensor parallelism
};

}  // namespace foretell
