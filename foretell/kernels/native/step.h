// A model and a step of it, as Python hands them over; foretell/kernels/native/records.py has the same fields.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace foretell {

struct Layer {
    const Weights *qkv, *out, *gate_up, *down;
    const float *attention_norm, *ffn_norm;
    const float *q_norm, *k_norm;                        // or null
    const float *attention_post_norm, *ffn_post_norm;    // or null
    const float* turns;                                  // [context, 2, head_dim]
    float *keys, *values;                                // [slots, kv_heads, head_dim]
    int64_t window;                                      // 0: none
};

struct Model {
    const Layer* layers;
    const Weights* head;
    const float *embed, *norm;
    int64_t layer_count, width, heads, kv_heads, head_dim, ffn, page_size;
    int64_t first_token, tokens;  // whose rows of the embedding lie here
    float eps, scale, embed_scale;
    int32_t gelu, level;
};

// The rows of one sequence. Nodes of a tree are its last rows; a chain has none.
struct Span {
    int64_t first, rows, start, first_page, nodes, first_parent;
};

// Adds up in place what all ranks have, and says whether that went well.
using Join = bool (*)(float* numbers, int64_t count);

struct Step {
    const int64_t *tokens, *positions, *slots;  // [rows]
    const Span* spans;
    const int64_t *pages, *parents;  // of all spans
    const int64_t* wanted;           // rows whose logits are wanted, rising
    const int64_t* taps;             // after how many layers states are wanted
    float* logits;                   // [wanted, vocab]
    float* features;                 // [rows, taps, width]
    int64_t* likeliest;              // [wanted]
    int64_t rows, span_count, wanted_count, tap_count;
    Join join;                       // null: all of the model is here
};

}  // namespace foretell
