"""Errors a user can act on. Each message is one line that says what would do."""

from __future__ import annotations


class ForetellError(Exception):
    """Something the user can mend; shown as one line, without a stack trace."""

    exit_code = 1


class RequestError(ForetellError, ValueError):
    """The caller asked for something that cannot be done. `field` names what to change."""

    exit_code = 2

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ModelError(ForetellError):
    """A model that cannot be found, read or served."""


class UnknownModelError(ModelError):
    """No model goes by this name."""

    exit_code = 2


class UnsupportedModelError(ModelError):
    """The model is readable but of a kind that is not served here."""

    exit_code = 2


class RankError(ForetellError):
    """One of the processes that a model is split over has ended, and the others cannot go on without it."""


class CapacityError(ForetellError):
    """Memory, pages or disk do not suffice."""


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
