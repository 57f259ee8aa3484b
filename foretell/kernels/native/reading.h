// What a head keeps of places that the target has run; foretell/kernels/native/head_records.py has the same fields.
#pragma once

#include "head.h"

namespace foretell {

struct Reader {
    Head head;
    const Weights* const* keeps;     // of each layer, for keys and values alone
    const Weights* fuse;             // of all taps; null: the feature is the state itself
    const float* target_norm;        // before all else, or null
    const float* const* tap_norms;   // of each tap, or null
    const float* all_norm;           // of all taps together, or null
    const float* fused_norm;         // or null
    float* features;                 // [slots, width]: kept of each place; null: not kept
    const int64_t* columns;          // where each tap begins in a row of states
    int64_t taps, target_width;
    float target_eps;
    int32_t pairs;  // whether keys and values are of a token with the feature before it; else of the feature alone
};

struct Reading {
    const float* const* states;                  // [rows]
    const int64_t *slots, *places;               // [rows]
    const int64_t *tokens, *before, *own, *at;   // [pairs]: a token, the slot before it, its own slot, its place
    const int64_t *pages, *first_pages, *texts;  // of all texts; where each text's begin; [pairs]: whose a pair is
    int64_t rows, pairs;
};

}  // namespace foretell
