"""Questions a model was taught to answer, drawn from the model itself: what it says where its chat template has the
user speak. For training heads, as lines {"prompt", "source"}; they need no licence but the model's.

    python recipes/own_questions.py DATA questions.jsonl.xz [--count 45000]

DATA is the folder `permissive_prompts.py` reads: a question that shares 14 words in a row with what heads are measured
with is left out, and so is one that was drawn before or does not come to an end.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from pathlib import Path

import torch
from permissive_prompts import measured, windows

from foretell.build.model_source import ModelSource, open_model
from foretell.config import EngineConfig
from foretell.models.hf_config import eos_token_ids
from foretell.tokenizer import Tokenizer
from foretell.train.sampler import Sampler, Wish

MARK = "question"  # one token
SLOTS = {"cuda": 1024, "cpu": 16}
SHORTEST = 8  # characters of a question


def opening(tokenizer: Tokenizer) -> list[int]:
    """A chat up to where the user's first words stand."""
    chat, mark = tokenizer.encode_chat([{"role": "user", "content": MARK}]), tokenizer.encode(MARK)[-1]
    if mark not in chat:
        raise SystemExit("this model's chat template does not show where the user speaks; give prompts of your own")
    return chat[: chat.index(mark)]


def drawn(opened: ModelSource, args: argparse.Namespace) -> list[str]:
    """As many texts as asked, fewer those that did not come to an end."""
    begin, ends = opening(opened.tokenizer), opened.tokenizer.end_ids | eos_token_ids(opened.checkpoint)
    wishes = [Wish(i, begin, args.temperature, args.longest) for i in range(args.count)]
    slots = min(SLOTS[opened.device.type], args.count)
    with torch.inference_mode():
        model = opened.load()
    sampler = Sampler(model, slots, len(begin) + args.longest + 1, ends, args.seed)
    texts = (tokens for _, tokens in sampler.write(wishes) if tokens and tokens[-1] in ends)
    return [opened.tokenizer.decode(tokens).strip() for tokens in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--count", type=int, default=45_000)
    parser.add_argument("--temperature", type=float, default=0.85)
    parser.add_argument("--longest", type=int, default=384, help="tokens of a question")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count must be 1 or more, not {args.count}")
    began, forbidden = time.time(), measured(args.data)
    opened = open_model(args.target, EngineConfig(model=args.target, device=args.device, quantization="none"), print)
    found = drawn(opened, args)
    once = list(dict.fromkeys(text for text in found if len(text) >= SHORTEST))
    kept = [text for text in once if not any(run in forbidden for run in windows(text))]
    with lzma.open(args.out, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": text, "source": "own"}, ensure_ascii=False) + "\n" for text in kept)
    took = f"{time.time() - began:.0f} s"
    print(
        f"{len(kept)} questions of {len(found)} that ended; {len(once) - len(kept)} stand in what is measured; {took}"
    )


if __name__ == "__main__":
    main()
