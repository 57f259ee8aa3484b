"""The tensors that torch allocates, which tracemalloc does not see."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the bytes of every tensor that operations make in memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in given:
                self.bytes.append(result.untyped_storage().nbytes())
        return result
