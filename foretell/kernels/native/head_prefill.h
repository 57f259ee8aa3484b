// Prefill of a draft head: the keys and values it keeps of positions that the target has run;
// foretell/kernels/native/records.py has the same fields.
#pragma once

#include "head.h"

namespace foretell {

struct PrefillHead {
    Head head;
    const Weights* const* kv_weights;        // of each layer, for keys and values only
    const Weights* fc_weights;               // of all hidden layers; null: the target state is the hidden state
    const float* target_norm;                // the target's final norm, applied first; or null
    const float* const* hidden_layer_norms;  // of each hidden layer, or null
    const float* concat_norm;                // of the concatenated hidden layers, or null
    const float* projected_norm;             // or null
    float* hidden_states;                    // [slots, width]: cache of projected hidden states; null: none
    const int64_t* column_offsets;           // first column of each hidden layer in a row of target states
    int64_t num_hidden_layers, target_width;
    float target_eps;
    int32_t pairs;  // whether keys and values are of (token, previous hidden state); else of the hidden state
};

struct HeadPrefill {
    const float* const* target_states;  // [rows]
    const int64_t *slots, *positions;   // [rows]
    // [pairs]: token, slot of the previous hidden state, own slot, position
    const int64_t *tokens, *source_slots, *pair_slots, *pair_positions;
    // Pages of all sequences; the first of each sequence; [pairs]: the sequence of a pair
    const int64_t *pages, *first_pages, *sequence_of;
    int64_t rows, pairs;
};

}  // namespace foretell
