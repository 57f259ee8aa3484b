"""Draft heads: small modules that read the target's hidden states and draft its next tokens.

The module that is trained is the module that is served. Both make one like this:

    head = make_head(config)                    # EagleHead, BlockHead, MedusaHead .., by config
    head.draft_ids.copy_(ids)                   # ascending target token ids, if `config.draft_vocab` is a subset
    head.to(device, dtype)
    head.share_weights(TargetWeights.of(target))  # target: an unprepared `Decoder`; after `to`, before forward
    head.prepare(context)                       # builds the RoPE table
    head.init_weights(generator)                # random weights to train; `head.trainable_parameters()` are trained
    write_head(head, folder)                    # config.json and model.safetensors, without shared weights
    head = read_head(folder)                    # what `write_head` wrote; then `share_weights` and `prepare`
    part = make_head(config, shard)             # the part of one tensor-parallel rank; `part.join_ranks(ranks)`

Hidden states are the target's, [..., hidden layers * target_width]: `Decoder.forward(batch, cache, hidden_layers)`
returns a list, and heads read it concatenated along the last dimension in the order of `config.hidden_layers`. Index 0
is the embedding, L the output of the last layer before the final norm. Leading dimensions [...] are free. Only
attention mixes rows, and the caller implements it: `attend(layer, q, k, v)` gets rotated q [..., heads, dim], k and v
[..., kv_heads, dim] and returns [..., heads, dim]. `config.layer.scale` scales the scores, `config.layer.window` is the
sliding window.

EAGLE and MTP. The pair (hidden state of position p-1, token of position p) is the input at position p, from p = 1 on.
    g = head.fuse(hidden_states)                              # [..., width], for every position, from the target
    states = head.step(tokens, g_before, rope_rows, attend)   # tokens x_p, g of p-1, head.rope_rows(positions p)
    logits = head.logits(states)                              # [..., outputs], float32, over `draft_ids`: x_{p+1}
    g_next = head.carry(states)                               # hidden state of position p for the next step
Step s of training-time test (EAGLE-3) is `step(tokens shifted left by s, carry of step s-1, rope_rows(positions + s),
attend)`; `attend` keeps the keys of step 0, of which a row sees those up to its own, and of later steps a row sees only
its own column. RoPE is relative, so positions may count from the token or from the hidden state.

BLOCK (DFlash, DSpark). The context is kept as keys and values of the projected hidden states, without a layer norm.
    inputs = head.with_token_hints(hidden_states, tokens)     # adds hints of recent tokens if `config.look_back`
    context = head.context_kv(head.fuse(inputs), head.rope_rows(positions))   # (k, v) for each layer
    states = head(anchors, rope_rows, attend)   # anchors [...], positions t .. t+block-1 -> [..., block, width], normed
    drafts = head.draft_states(states)          # without the anchor's row unless `sample_from_anchor`
    logits = head.logits(drafts, before)        # draft j is for position t+1+j; `before` [..., drafts]: tokens of t+j
    head.confidence_logits(drafts, before)      # logits of the confidence head
`attend(layer, q, k, v)` gets the rows of the block; it adds `context[layer]` of the positions before the anchor t and
masks later rows of the block if `config.causal_in_block`.

MEDUSA. No attention. The hidden state of position t-1, the one before the anchor, drafts positions t+1, t+2 ..
    logits = head.logits(head(hidden_states))   # [..., heads, outputs]

ASSISTANT (Gemma 4). It attends to the target's own KV: `groups` are the spans of the target's cache, and the position
stays that of the last token. The input is (normalized hidden state before the last token, last token).
    states = head.step(tokens, hidden, positions, groups, cache)   # [n, width]
    logits, hidden = head.logits(states), head.carry(states)       # of the next draft token, for the next step

Parameter names are part of the file format: `fc`, `tap_norms.i`, `fc_norm`, `embed_norm`, `feature_norm`, `norm`,
`output`, `embed` (if own), `layers.i.{attention_norm,ffn_norm}`, `layers.i.attention.{q,kv,out,q_norm,k_norm}` (keys
above values in kv), `layers.i.ffn.{gate_up,down}` (gate above up), `hints`, `mask`, `markov_in` [vocab, rank],
`markov_out`, `surety` (the confidence head), `blocks.head.layer`.
"""

from .assistant import AssistantHead
from .base import DraftHead, TargetWeights
from .block import BlockHead
from .config import (
    AssistantConfig,
    BlockConfig,
    DistilledConfig,
    EagleConfig,
    HeadConfig,
    LayerConfig,
    MedusaConfig,
    MtpConfig,
    read_head_config,
)
from .distilled import DistilledHead
from .eagle import EagleHead
from .io import make_head, read_head, write_head
from .layer import Attend, RopeRows
from .medusa import MedusaHead
from .mtp import MtpHead

__all__ = [
    "AssistantConfig",
    "AssistantHead",
    "Attend",
    "BlockConfig",
    "BlockHead",
    "DistilledConfig",
    "DistilledHead",
    "EagleConfig",
    "EagleHead",
    "DraftHead",
    "HeadConfig",
    "LayerConfig",
    "TargetWeights",
    "MedusaConfig",
    "MedusaHead",
    "MtpConfig",
    "MtpHead",
    "RopeRows",
    "make_head",
    "read_head",
    "read_head_config",
    "write_head",
]
