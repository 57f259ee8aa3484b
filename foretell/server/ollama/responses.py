"""Response bodies of Ollama's API for the OpenAPI schema; `builders.py` and `models.py` build them as dictionaries."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from foretell.server.openai.responses import SpeculationInfo, TimingInfo


class OllamaError(BaseModel):
    """An error in Ollama's shape."""

    error: str = Field(description="One line: what is wrong; what would work.")


class OllamaResponse(BaseModel):
    """The fields of every complete response, and of the last line of a stream. All are left out if nothing ran."""

    model: str = Field(description="Name of the model.")
    created_at: str = Field(description="Time in RFC 3339.")
    done: bool = Field(description="Whether the output is complete.")
    done_reason: str = Field(description="stop, length (the token limit), load or unload (no prompt).")
    prompt_eval_count: int | None = Field(default=None, description="Prompt tokens.")
    eval_count: int | None = Field(default=None, description="Output tokens.")
    total_duration: int | None = Field(default=None, description="Nanoseconds from arrival to the end.")
    load_duration: int | None = Field(default=None, description="Always 0.")
    prompt_eval_duration: int | None = Field(default=None, description="Nanoseconds of the prefill.")
    eval_duration: int | None = Field(default=None, description="Nanoseconds of the output.")
    timings: TimingInfo | None = Field(default=None, description="llama.cpp's timings.")
    metrics: dict[str, Any] | None = Field(
        default=None, description="vLLM's `speculative_decoding` statistics; present if drafting was allowed."
    )
    speculation: SpeculationInfo | None = Field(default=None, description="Rule, drafters and draft tokens.")


class OllamaChatResponse(OllamaResponse):
    """The response of /api/chat."""

    message: dict[str, Any] = Field(description="`role`, `content`, and if there are any `thinking` and `tool_calls`.")


class OllamaGenerateResponse(OllamaResponse):
    """The response of /api/generate."""

    response: str = Field(description="The text.")
    thinking: str | None = Field(default=None, description="The reasoning, if the model has one.")


class OllamaVersion(BaseModel):
    """The response of /api/version."""

    version: str = Field(description="The version of Ollama's API that this follows.")
    foretell: str = Field(description="Version of Foretell.")


class OllamaModelList(BaseModel):
    """The served model under each of its names."""

    models: list[dict[str, Any]] = Field(description="`name`, `model`, `size` in bytes, `digest`, `details`.")


class OllamaModelInfo(BaseModel):
    """A description of the model."""

    modelfile: str = Field(description="The name of the model.")
    parameters: str = Field(description="Sampling parameters of the model's generation config.")
    template: str = Field(description="Its chat template.")
    details: dict[str, Any] = Field(description="Format and quantization.")
    model_info: dict[str, Any] = Field(description="`foretell.context_length`: the context length in tokens.")
    capabilities: list[str] = Field(
        description="completion, and if the model has them tools, insert (fill-in-the-middle) and thinking."
    )
    modified_at: str = Field(description="Time of the server's start in RFC 3339.")
