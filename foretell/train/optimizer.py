"""Optimizers over float32 masters, whatever type the module computes in."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
LEAST = 0.02  # of the highest learning rate, at the end
TABLE = 32  # a matrix so many times as long as wide is a table of words, not a map, and is not to be evened out


class Optimizer:
    """Takes gradients from the module's parameters and gives them their new values.

    With `evened`, matrices are moved by Muon (all directions of a step alike long, as large as AdamW's would be);
    the rest, and without it everything, by AdamW.
    """

    def __init__(
        self, parameters: list[nn.Parameter], rate: float, warmup: int, clip: float, evened: bool = False
    ) -> None:
        self.parameters, self.rate, self.warmup, self.clip = parameters, rate, warmup, clip
        self.has_masters = any(each.dtype != torch.float32 for each in parameters)
        self.masters = [each.detach().float().clone() for each in parameters] if self.has_masters else parameters
        self.inner = self._made(evened)

    def _made(self, evened: bool) -> list[torch.optim.Optimizer]:
        maps = [each for each in self.masters if evened and _is_map(each)]
        rest = [each for each in self.masters if not any(each is one for one in maps)]
        made: list[torch.optim.Optimizer] = []
        if maps:
            made.append(torch.optim.Muon(maps, lr=self.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if rest:
            fused = rest[0].device.type == "cuda"
            made.append(torch.optim.AdamW(rest, lr=self.rate, betas=BETAS, weight_decay=0.0, fused=fused))
        return made

    def step(self, number: int, share: float) -> float:
        """One step, the `number`th, when `share` of the run is done; the gradient's length comes back."""
        if self.has_masters:
            for master, each in zip(self.masters, self.parameters, strict=True):
                master.grad = None if each.grad is None else each.grad.float()
        length = float(torch.nn.utils.clip_grad_norm_(self.masters, self.clip))
        for inner in self.inner:
            for group in inner.param_groups:
                group["lr"] = self.rate * self.lr_factor(number, share)
            if math.isfinite(length):
                inner.step()
            inner.zero_grad(set_to_none=True)
        if self.has_masters:
            with torch.no_grad():
                torch._foreach_copy_([*self.parameters], [*self.masters])
            for each in self.parameters:
                each.grad = None
        return length

    def lr_factor(self, number: int, share: float) -> float:
        """Up over the first steps, then down a cosine."""
        up = min(1.0, (number + 1) / max(1, self.warmup))
        return up * (LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))

    def state(self) -> dict[str, Tensor]:
        """Moments, and masters where they are not the parameters themselves, by the parameter's number."""
        found: dict[str, Tensor] = {}
        for i, master in enumerate(self.masters):
            if self.has_masters:
                found[f"{i}.master"] = master.detach()
            for name, value in self._of(master).state.get(master, {}).items():
                found[f"{i}.{name}"] = value
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """What `state` gave."""
        with torch.no_grad():
            for i, (master, each) in enumerate(zip(self.masters, self.parameters, strict=True)):
                if self.has_masters:
                    master.copy_(state[f"{i}.master"])
                    each.copy_(master)
                names = [name for name in state if name.startswith(f"{i}.") and name != f"{i}.master"]
                if names:
                    self._of(master).state[master] = {
                        name.partition(".")[2]: self._placed(name, state[name], master) for name in names
                    }

    def _of(self, master: Tensor) -> torch.optim.Optimizer:
        """The one that moves it."""
        mine = (one for one in self.inner for group in one.param_groups if any(p is master for p in group["params"]))
        return next(mine)

    @staticmethod
    def _placed(name: str, value: Tensor, master: Tensor) -> Tensor:
        """A count of steps stays on the host unless the optimizer is fused, as torch has it."""
        if name.endswith(".step") and master.device.type != "cuda":
            return value.clone()
        return value.to(master.device).clone()


def _is_map(x: Tensor) -> bool:
    return x.dim() == 2 and max(x.shape) < TABLE * min(x.shape)
