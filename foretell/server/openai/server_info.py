"""The body of /server_info for the OpenAPI schema; `routes/status.py` builds it as a dictionary."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class RuleNames(BaseModel):
    """Verification rules that a request may name."""

    lossless: list[str] = Field(description="Rules that keep the target's output or distribution.")
    lossy: list[str] = Field(description="Rules that may change the output.")


class MemoryInfo(BaseModel):
    """Memory in bytes: upper bounds from the settings, and the process as it is now."""

    weights: int = Field(description="Weights of the target.")
    drafter: int = Field(description="Weights of the drafters.")
    cache: int = Field(description="KV cache when all pages are in use.")
    step: int = Field(description="Activations of the largest step.")
    program: int = Field(description="The process itself.")
    total: int = Field(description="Sum of the above.")
    pages: int = Field(description="Pages of the KV cache (a number, not bytes).")
    resident: int = Field(description="Resident memory now.")
    resident_files: int = Field(description="Its file-backed part, which processes share.")


class EngineState(BaseModel):
    """The load now, and totals since the start."""

    avg_spec_accept_length: float = Field(description="Mean acceptance length: 1 + accepted / steps with a draft.")
    acceptance_rate: float = Field(description="Accepted over drafted tokens.")
    speedup: float | None = Field(description="Estimated speedup over plain decoding, once known.")
    running: int = Field(description="Running sequences.")
    waiting: int = Field(description="Waiting sequences.")
    pages_held: int = Field(description="KV pages in use.")
    preemptions: int = Field(description="Preempted sequences.")
    texts: int = Field(description="Finished sequences.")
    tokens: int = Field(description="Output tokens.")
    drafts: int = Field(description="Steps of sequences with a draft.")
    accepted_per_position: list[int] = Field(description="Drafts accepted up to each position.")
    step_seconds: float = Field(description="Time of all steps.")
    drafting_seconds: float = Field(description="Its part for drafting.")
    target_seconds: float = Field(description="Its part for the target's forward passes.")


class DecisionCount(BaseModel):
    """Number of times the controller decided so for a drafter."""

    drafter: str = Field(description="Name of the drafter.")
    decision: str = Field(description="`drafted` or `skipped`.")
    reason: str = Field(description="Why, as in the metric drafter_decisions_total.")
    steps: int = Field(description="Steps of sequences.")


class SpeculationState(BaseModel):
    """Statistics of speculative decoding since the start."""

    on: bool = Field(description="Whether the controller drafts at all at present.")
    reason: str | None = Field(description="Why it last switched drafting on or off.")
    drafters: dict[str, dict[str, int]] = Field(description="Drafted and accepted tokens by drafter.")
    decisions: list[DecisionCount] = Field(description="Decisions of the controller.")


class ServerInfo(BaseModel):
    """The model, the settings, the memory and the speculation statistics of a server."""

    version: str = Field(description="Version of Foretell.")
    model: str = Field(description="The model as given at the start.")
    revision: str | None = Field(description="Its revision on Hugging Face, if given.")
    served_model_names: list[str] = Field(description="Names of the model in the API.")
    max_model_len: int = Field(description="Context length in tokens.")
    drafter: str = Field(description="Drafter, or mix for several.")
    drafters: list[str] = Field(description="Drafters that a request may name.")
    max_draft: int = Field(description="Maximum draft tokens per sequence and step.")
    rule: str = Field(description="Verification rule of requests that name none.")
    rules: RuleNames = Field(description="Names of all verification rules, by what they keep.")
    sampling_defaults: dict[str, Any] = Field(description="Sampling parameters of the model's generation config.")
    chats: bool = Field(description="Whether the model has a chat template.")
    tool_calls: str | None = Field(description="Format of its tool calls.")
    reasoning: bool = Field(description="Whether reasoning is returned as reasoning_content.")
    memory: MemoryInfo = Field(description="Memory in bytes.")
    internal_states: list[EngineState] = Field(description="The load and totals of the engine; one entry.")
    speculation: SpeculationState = Field(description="Statistics of speculative decoding.")
