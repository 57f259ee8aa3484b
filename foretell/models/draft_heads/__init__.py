"""Heads: small modules that see the target's states and guess how it goes on. The module trained is the module served.

How one is made, trained or served alike:

    head = make_head(config)            # EagleHead, BlockHead, MedusaHead or MtpHead, by the config's class
    head.draft_ids.copy_(ids)           # where `config.draft_vocab` says there are fewer; rising ids of the target's
    head.to(device, dtype)
    head.borrow(Lender.of(target))      # target: an unprepared `Decoder`; after `to`, before the first forward
    head.prepare(context)               # the table of turns
    head.start(generator)               # random weights, to train from; `head.trained()` gives what may be trained
    write_head(head, folder)            # config.json and model.safetensors, without what is borrowed
    head = read_head(folder)            # what `write_head` wrote; `borrow` and `prepare` as above
    part = make_head(config, shard)     # what one of several ranks has of it; `part.meet(ranks)` before it runs

Features are the target's states, [..., taps * target_width]: `Decoder.forward(batch, cache, taps)` gives the list, and
`cat` along the last dimension is what heads read, in the order of `config.taps`. Taps are canonical: 0 is the
embedding, L what the last layer gives before the norm. Leading dimensions [...] are free; attention alone mixes rows,
and it is the caller's: `attend(layer, q, k, v)` gets turned q [..., heads, dim], k and v [..., kv_heads, dim], and
returns [..., heads, dim]. `config.layer.scale` is what scores are multiplied with, `config.layer.window` how far rows
look back.

EAGLE and MTP. The pair (feature of place p-1, token of place p) stands at place p, from p = 1 on: place 0 has none.
    g = head.fuse(features)                             # [..., width]: of every place, from the target
    states = head.step(tokens, g_before, turn, attend)  # tokens x_p, g of p-1, turn = head.turn(positions p)
    logits = head.logits(states)                        # [..., outputs], float32, over `draft_ids`: guesses x_{p+1}
    g_next = head.carry(states)                         # the feature of place p in the next training-time-test step
Step s of training-time test is `step(tokens shifted left by s, carry of step s-1, turn(positions + s), attend)`;
`attend` keeps the keys of step 0 and shows each row those up to its own, and of later steps its own column's only.
Turns are relative, so it does not matter whether positions count from the token or from the feature.

BLOCK. What was read is kept as keys and values of the fused features, made without any norm of a layer's.
    given = head.known(features, tokens)   # with words of the tokens up to each place, where `config.look_back`
    read = head.remember(head.fuse(given), head.turn(positions))  # for each layer (k, v)
    states = head(anchors, turn, attend)   # anchors [...], turn of places t .. t+block-1 -> [..., block, width], normed
    guesses = head.guessing(states)        # drops the anchor's row where `sample_from_anchor` is off
    logits = head.logits(guesses, before)  # guess j is of place t+1+j; `before` [..., drafts]: the tokens of t+j
    head.sure(guesses, before)             # logits of the confidence head
`attend(layer, q, k, v)` is called with the block's rows; it adds `read[layer]` of places before the anchor, t not
included, and hides later rows of the block where `config.causal_in_block`.

MEDUSA. No attention. The state of place t-1, the one before the anchor, gives guesses of places t+1, t+2 ..
    logits = head.logits(head(features))  # [..., heads, outputs]

Parameters: `fc`, `tap_norms.i`, `fc_norm`, `embed_norm`, `feature_norm`, `norm`, `output`, `embed` (where own),
`layers.i.{attention_norm,ffn_norm}`, `layers.i.attention.{q,kv,out,q_norm,k_norm}` (kv: keys above values),
`layers.i.ffn.{gate_up,down}` (gate above up), `hints`, `mask`, `markov_in` [vocab, rank], `markov_out`, `surety`,
`blocks.head.layer`.
"""

from .base import DraftHead, TargetWeights
from .block import BlockHead
from .config import (
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
