"""Errors a user can act on. Each message is one line: what is wrong, and what would work."""

from __future__ import annotations


class ForetellError(Exception):
    """An error the user can fix; shown as one line, without a stack trace."""

    exit_code = 1


class RequestError(ForetellError, ValueError):
    """An invalid setting or argument. `field` names what to change."""

    exit_code = 2

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ContextLengthError(RequestError):
    """A request that does not fit into the context of `limit` tokens.

    `reason` follows "However, " in the wording of OpenAI's API, by which clients recognize the error.
    """

    def __init__(self, field: str, message: str, limit: int, reason: str) -> None:
        super().__init__(field, message)
        self.api_message = f"This model's maximum context length is {limit} tokens. However, {reason}"


class ModelError(ForetellError):
    """A model that cannot be found, read or served."""


class UnknownModelError(ModelError):
    """A model name that is not known."""

    exit_code = 2


class UnsupportedModelError(ModelError):
    """A model whose architecture is not supported."""

    exit_code = 2


class RankError(ForetellError):
    """A worker process of a tensor-parallel model has ended, without which the others cannot run."""


class CapacityError(ForetellError):
    """Memory, KV pages or disk space do not suffice."""


OOM_MESSAGES = ("out of memory", "alloc_failed", "can't allocate memory")  # of torch, cuBLAS and the CUDA driver


def is_oom(error: Exception) -> bool:
    """Return whether an allocation failed, on the host or on a device.

    Python, numpy and the native kernels raise MemoryError; torch's allocators, the CUDA libraries and the driver raise
    RuntimeErrors with messages of their own.
    """
    import torch  # not at the top: this module is imported by commands that need no torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in OOM_MESSAGES)
