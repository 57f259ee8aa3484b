"""transformers in this process, as one of the peers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from foretell.errors import ForetellError

from .peers import Asked, Reply
from .prompt import BenchPrompt

if TYPE_CHECKING:
    from foretell.build.model_source import ModelSource

PLAIN, LOOKUP = TRANSFORMERS = ("transformers", "transformers:lookup")
ABLE = ("temperature", "seed", "prediction")  # fields of a request that it is asked with, or whose loss changes no text
LOOKED_UP = 10  # tokens guessed each step from the prompt, as transformers' own guide has it


class Clock:
    """Hears of each token as transformers writes it."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first: float | None = None
        self.last = 0.0
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        """First comes the prompt, then what is written."""
        if self._prompt_seen:
            self.last = time.perf_counter() - self.began
            self.first = self.last if self.first is None else self.first
        self._prompt_seen = True

    def end(self) -> None:
        """All was put already."""


class TransformersPeer:
    """The same weights in floats, greedy or sampled, asked with our own tokens: what others make of the tokenizer in a
    GGUF file is not always that tokenizer."""

    def __init__(self, target: ModelSource, names: Sequence[str]) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise ForetellError("transformers is not installed; install it, or leave that peer out") from None
        path = target.checkpoint.path
        where: dict[str, Any] = {"gguf_file": path.name} if target.checkpoint.kind == "gguf" else {}
        folder = path.parent if where else path
        dtype = torch.float32 if target.device.type == "cpu" else target.dtype
        self.torch, self.tokenizer, self.ends = torch, target.tokenizer, sorted(target.tokenizer.end_ids)
        self.model = cast(Any, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where))
        self.model.to(target.device).eval()
        self.steps = 0
        self.model.register_forward_hook(self._count)
        self.peers = [_Way(self, name, name == LOOKUP) for name in names]

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def describe(self) -> dict[str, Any]:
        import transformers

        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"kind": f"transformers {transformers.__version__}", "dtype": dtype}

    def encode(self, item: BenchPrompt) -> list[int]:
        if item.text is not None:
            return self.tokenizer.encode(item.text)
        return self.tokenizer.encode_chat(item.messages)

    def write(self, item: BenchPrompt, asked: Asked, lookup: bool) -> Reply:
        """One text; transformers' own warnings and faults are a reply too."""
        if unable := [name for name in item.fields if name not in ABLE]:
            return Reply("", 0, None, 0.0, error=f"transformers is not asked with {', '.join(unable)} here")
        ids = self.torch.tensor([self.encode(item)], device=self.model.device)
        settings: dict[str, Any] = {"do_sample": asked.temperature > 0}
        if asked.temperature > 0:
            settings["temperature"] = asked.temperature
        if lookup:
            settings["prompt_lookup_num_tokens"] = LOOKED_UP
        clock = Clock()
        self.steps = 0
        try:
            with self.torch.inference_mode():
                found = self.model.generate(
                    ids,
                    attention_mask=self.torch.ones_like(ids),
                    max_new_tokens=asked.max_tokens,
                    eos_token_id=self.ends,
                    pad_token_id=self.ends[0],
                    streamer=clock,
                    **settings,
                )
        except Exception as error:
            return Reply("", 0, None, 0.0, error=" ".join(str(error).split())[:200] or type(error).__name__)
        new = found[0, ids.shape[1] :].tolist()
        return Reply(self.tokenizer.decode(new), len(new), clock.first, clock.last, float(self.steps))


class _Way:
    """One way to let it write: plain, or with guesses looked up in the prompt."""

    def __init__(self, model: TransformersPeer, name: str, lookup: bool) -> None:
        self.model, self.name, self.lookup = model, name, lookup

    def write(self, item: BenchPrompt, asked: Asked) -> Reply:
        return self.model.write(item, asked, self.lookup)

    def describe(self) -> dict[str, Any]:
        return self.model.describe()
