"""vLLM as a child of `gpu_peers.py`: one configuration, in this process, asked for token ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version as installed
from importlib.util import find_spec
from typing import Any

from engine_child import Job, Written, answer

WARM_UP = 8  # tokens, as ours has
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


class VllmEngine:
    """`settings` are those of its `LLM`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm  # only now does what it prints go to the log

        self.vllm = vllm
        speculative = settings.get("speculative_config")
        if speculative is not None and speculative["method"] == "ngram" and find_spec("numba") is None:
            speculative["method"] = "ngram_gpu"  # the same without numba
        self.settings = settings
        self.llm = vllm.LLM(**settings)
        self.accepted = 0

    def about(self) -> dict[str, Any]:
        speculative = self.settings.get("speculative_config") or {}
        return {
            "vllm": self.vllm.__version__, "torch": installed("torch"), "method": speculative.get("method", "none"),
            "graphs": self._graphs(),
        }  # fmt: skip

    def prepare(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.begin(job)(job.prompts[: job.batch])

    def begin(self, job: Job) -> Callable[[list[list[int]]], Any]:
        warm_up, params = (
            self.vllm.SamplingParams(temperature=job.temperature, max_tokens=tokens, ignore_eos=True)
            for tokens in (min(WARM_UP, job.tokens), job.tokens)
        )
        self._write([job.prompts[0][::-1]], warm_up)
        self.accepted = self._count()
        return lambda prompts: self._write(prompts, params)

    def _write(self, prompts: list[list[int]], params: Any) -> Any:
        asked = [self.vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return self.llm.generate(asked, params, use_tqdm=False)

    def read(self, outputs: Any) -> Written:
        before, self.accepted = self.accepted, self._count()
        times = [output.metrics for output in outputs]
        decoding = sum(each.last_token_ts - each.first_token_ts for each in times if each is not None)
        return Written([list(output.outputs[0].token_ids) for output in outputs], decoding, self.accepted - before)

    def _count(self) -> int:
        """Return the draft tokens accepted since the engine was loaded."""
        return int(sum(metric.value for metric in self.llm.get_metrics() if metric.name == ACCEPTED))

    def _graphs(self) -> str:
        """Return which CUDA graphs are captured: those of the target, and after a plus those of a draft model."""
        try:
            config = self.llm.llm_engine.vllm_config.compilation_config
            (drafter,) = self.llm.collective_rpc(drafter_graphs)
        except Exception as error:  # no part of what vLLM promises, and no reason to go without the rest
            return f"unknown ({error})"
        return config.cudagraph_mode.name + (f" + {drafter}" if drafter else "")


def drafter_graphs(worker: Any) -> str:
    """Of a worker's drafter, where it runs a model."""
    dispatcher = getattr(getattr(worker.model_runner, "drafter", None), "cudagraph_dispatcher", None)
    return "" if dispatcher is None else str(dispatcher.cudagraph_mode.name)


if __name__ == "__main__":
    answer(lambda: VllmEngine(json.loads(sys.argv[1])))
