// A head and what it is asked for, as Python hands them over; foretell/kernels/native/head_records.py has the same fields.
#pragma once

#include <cstdint>

#include "choose.h"
#include "step.h"

namespace foretell {

struct Reading;

// What the first layer adds its result to.
enum Residual : int32_t { kInput = 0, kFeature = 1, kNormedFeature = 2 };

struct Head {
    const Layer* layers;
    const Weights* join;  // of an embedding and a feature, side by side; null: none
    const Weights* output;
    const float* embed;
    const float *embed_norm, *feature_norm, *norm;  // or null
    const int64_t* ids;                             // the target's token for each output; null: the same
    int64_t layer_count, width, heads, kv_heads, head_dim, ffn, page_size;
    float eps, scale, embed_scale;
    int32_t gelu, level;
    int32_t side_by_side;  // whether the first layer attends with both, not joined
    int32_t residual;      // a `Residual`
    int32_t norm_output;   // whether the next step gets the normed state
};

// One guess after another for several texts. Each row goes on while it is asked for and likely enough to stand.
struct Chain {
    const int64_t *tokens, *places;      // [rows]: the last token of each text, and its place
    const int64_t *pages, *first_pages;  // of all texts; where each text's begin
    const int64_t* depths;               // [rows]
    const float* floors;                 // [rows]
    float* features;                     // [rows, width]: before the tokens; of one step alone, behind them afterwards.
                                         // Null where the head reads tokens alone
    float* logits;                       // [rows, outputs]: of the last step; null: nobody asks, there are guesses
    int64_t* guesses;                    // [depth, rows], -1 behind a row's end; null: the logits of one step are wanted
    float* sure;                         // [depth, rows]
    int64_t rows, depth;
    const int64_t* branches;             // [rows, branch]: slots of the last places each row sees, its own the last of
    int64_t branch;                      // them: rows of one step that are nodes of trees; null: all lie in the pages
    const Draw* draws;                   // [depth, rows]: how each guess is drawn; null: the likeliest is taken
    float* probs;                        // [rows, depth, vocab], zeros: what each was drawn from; null: nobody asks
    int64_t vocab;
    const Reading* along;                // places that are read with the first step, by heads of tokens alone; or null
};

// What a block head is made of beside its layers.
struct BlockHead {
    Head head;                 // `features` it has none
    const float* masks;        // [rows - 1, width]: embeddings of the places to be filled
    const float* markov_in;    // [vocab, rank]; null: none
    const Weights* markov_out;
    const float* surety;       // [width + rank or width], or null
    float surety_bias;
    int32_t surety_rank;       // how much of the Markov embedding it sees
    int64_t rank, rows;        // rows of a block
    int32_t from_anchor, causal, anchored;  // anchored: the anchor's embedding is added to the masks
    int64_t spare;             // slots behind all pages, for a block's own keys and values: as many texts' as fit
};

struct BlockChain {
    const int64_t *tokens, *places;      // [texts]: the last token of each text, and its place
    const int64_t *pages, *first_pages;  // of all texts; where each text's begin
    const int64_t* depths;               // [texts]
    const float* floors;                 // [texts]
    float* states;                       // [texts, rows, width], normed
    float* logits;                       // [texts, depth, outputs], without what a Markov head adds
    int64_t* guesses;                    // [depth, texts], -1 behind a text's end; null: states and logits are wanted
    float* sure;                         // [depth, texts]
    int64_t texts, depth;
};

}  // namespace foretell
