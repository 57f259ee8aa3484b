// Draft heads and draft requests; foretell/kernels/native/records.py has the same fields.
#pragma once

#include <cstdint>

#include "sample.h"
#include "step.h"

namespace foretell {

struct HeadPrefill;

// The residual of the first layer.
enum Residual : int32_t { kInput = 0, kHidden = 1, kNormedHidden = 2 };

struct Head {
    const Layer* layers;
    const Weights* fc;  // projects the concatenation of embedding and hidden state; null: none
    const Weights* output;
    const float* embed;
    const float *embed_norm, *hidden_norm, *norm;  // or null
    const int64_t* ids;  // target token of each output; null: the same ids
    int64_t layer_count, width, heads, kv_heads, head_dim, ffn, page_size;
    float eps, scale, embed_scale;
    int32_t gelu, level;
    int32_t concat_inputs;  // whether the first layer reads the concatenation (EAGLE-3)
    int32_t residual;  // a `Residual`
    int32_t norm_output;  // whether the next step reads the normalized state
    int32_t kv_type;  // a `KVType`
};

// Draft chains of several sequences. A row continues until its depth or until its path probability is too low.
struct DraftChain {
    const int64_t *tokens, *positions;  // [rows]: last token of each sequence and its position
    const int64_t *pages, *first_pages;  // pages of all sequences; first of each
    const int64_t* depths;  // [rows]
    const float* min_probs;  // [rows]
    float* hidden_states;  // [rows, width]: before the tokens; after a single step, those after them.
                           // Null for a head that reads tokens only
    float* logits;  // [rows, outputs] of the last step; null: not wanted
    int64_t* draft_tokens;  // [depth, rows], -1 after a row's end; null: compute the logits of one step
    float* confidences;  // [depth, rows]
    int64_t rows, depth;
    const int64_t* tree_slots;  // [rows, tree_slot_count]: for rows that are tree nodes, the slots of the path to
    int64_t tree_slot_count;  // each row, its own last; null: all keys are in the pages
    const SamplingParams* sampling;  // [depth, rows]; null: greedy
    float* probs;  // [rows, depth, vocab], zeroed: draft distributions; null: not wanted
    int64_t vocab;
    const HeadPrefill* prefill;  // prefilled with the first step, for heads that read tokens only; or null
};

// A block head (DFlash, DSpark).
struct BlockHead {
    Head head;  // without `fc` and `hidden_norm`
    const float* masks;  // [rows - 1, width]: mask embeddings of the drafted positions
    const float* markov_in;  // [vocab, rank]; null: none
    const Weights* markov_out;
    const float* confidence;  // [width + rank or width], or null
    float confidence_bias;
    int32_t confidence_rank;  // inputs from the Markov embedding
    int64_t rank, rows;  // rows of a block
    int32_t from_anchor, causal, anchored;  // anchored: the anchor's embedding is added to the masks
    int64_t scratch_slots;  // first slot after all pages, for the blocks' own keys and values
};

// Draft blocks of several sequences.
struct BlockDraft {
    const int64_t *tokens, *positions;  // [sequences]: last token of each sequence and its position
    const int64_t *pages, *first_pages;  // pages of all sequences; first of each
    const int64_t* depths;  // [sequences]
    const float* min_probs;  // [sequences]
    float* states;  // [sequences, rows, width], normed
    float* logits;  // [sequences, depth, outputs], without the Markov head
    int64_t* draft_tokens;  // [depth, sequences], -1 after a sequence's end; null: only states and logits
    float* confidences;  // [depth, sequences]
    int64_t sequences, depth;
};

}  // namespace foretell
