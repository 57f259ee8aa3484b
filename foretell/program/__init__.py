"""Programs of many generations: written as one function, run as one batch. `from foretell import program as fp`."""

from __future__ import annotations

from .backend import Backend, set_default_backend
from .endpoint import RuntimeEndpoint
from .expressions import Expression, assistant, gen, select, system, user
from .function import Function, function
from .local import Engine
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
