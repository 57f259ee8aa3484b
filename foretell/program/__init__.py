"""Structured generation programs with SGLang's frontend API: one function, run as one batch.

Use it as `from foretell import program as fp`.
"""

from __future__ import annotations

from .backend import ProgramBackend as Backend
from .backend import set_default_backend
from .endpoint import RuntimeEndpoint
from .expressions import Expression, assistant, gen, select, system, user
from .function import ProgramFunction as Function
from .function import function
from .local import LocalEngine as Engine
from .position import Cancelled, ProgramError
from .state import Forks, ProgramState

__all__ = [
    "Backend",
    "Cancelled",
    "Engine",
    "Expression",
    "Forks",
    "Function",
    "ProgramError",
    "ProgramState",
    "RuntimeEndpoint",
    "assistant",
    "function",
    "gen",
    "select",
    "set_default_backend",
    "system",
    "user",
]
