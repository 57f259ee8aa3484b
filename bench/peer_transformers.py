"""A child of peers.py: transformers in float32 over JSON lines. python peer_transformers.py FILE.gguf TOKENS"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

file, most = Path(sys.argv[1]), int(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def write(ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, float]:
    began = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return found[0, ids.shape[1] :], time.perf_counter() - began


for line in sys.stdin:
    ids = torch.tensor([json.loads(line)])
    _, first = write(ids, 1)
    new, whole = write(ids, most)
    print(json.dumps({"answer": new.tolist(), "speed": (len(new) - 1) / (whole - first)}), flush=True)
