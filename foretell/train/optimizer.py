"""Muon and AdamW over float32 master weights, whatever dtype the module computes in."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
MIN_LR_FACTOR = 0.02  # learning rate at the end of the cosine schedule, relative to the highest
MUON_MAX_ASPECT = 32  # longer than this many times its width, a matrix is an embedding table, which Muon does not suit


class Optimizer:
    """Steps float32 masters with the module's gradients and copies them back.

    With `muon`, weight matrices are updated by Muon, scaled to AdamW's RMS; all other parameters, and without it all
    parameters, by AdamW.
    """

    def __init__(
        self, parameters: list[nn.Parameter], rate: float, warmup: int, clip: float, muon: bool = False
    ) -> None:
        self.parameters, self.rate, self.warmup, self.clip = parameters, rate, warmup, clip
        self.has_masters = any(each.dtype != torch.float32 for each in parameters)
        self.masters = [each.detach().float().clone() for each in parameters] if self.has_masters else parameters
        self.inner = self._make_optimizers(muon)

    def _make_optimizers(self, muon: bool) -> list[torch.optim.Optimizer]:
        matrices = [each for each in self.masters if muon and _is_weight_matrix(each)]
        rest = [each for each in self.masters if not any(each is one for one in matrices)]
        made: list[torch.optim.Optimizer] = []
        if matrices:
            made.append(torch.optim.Muon(matrices, lr=self.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if rest:
            fused = rest[0].device.type == "cuda"
            made.append(torch.optim.AdamW(rest, lr=self.rate, betas=BETAS, weight_decay=0.0, fused=fused))
        return made

    def step(self, step: int, fraction_done: float) -> float:
        """Update the parameters and return the gradient norm. A step with a non-finite norm is skipped."""
        if self.has_masters:
            for master, each in zip(self.masters, self.parameters, strict=True):
                master.grad = None if each.grad is None else each.grad.float()
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.clip))
        for inner in self.inner:
            for group in inner.param_groups:
                group["lr"] = self.rate * self.lr_factor(step, fraction_done)
            if math.isfinite(norm):
                inner.step()
            inner.zero_grad(set_to_none=True)
        if self.has_masters:
            with torch.no_grad():
                torch._foreach_copy_([*self.parameters], [*self.masters])
            for each in self.parameters:
                each.grad = None
        return norm

    def lr_factor(self, step: int, fraction_done: float) -> float:
        """Return the learning rate relative to the highest: linear warm-up, then cosine decay."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup))
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, fraction_done)))
        return warmup * (MIN_LR_FACTOR + (1 - MIN_LR_FACTOR) * cosine)

    def state(self) -> dict[str, Tensor]:
        """Return moments and masters by parameter index."""
        found: dict[str, Tensor] = {}
        for i, master in enumerate(self.masters):
            if self.has_masters:
                found[f"{i}.master"] = master.detach()
            for name, value in self._optimizer_of(master).state.get(master, {}).items():
                found[f"{i}.{name}"] = value
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the master weights and moments that `state` returned."""
        with torch.no_grad():
            for i, (master, each) in enumerate(zip(self.masters, self.parameters, strict=True)):
                if self.has_masters:
                    master.copy_(state[f"{i}.master"])
                    each.copy_(master)
                names = [name for name in state if name.startswith(f"{i}.") and name != f"{i}.master"]
                if names:
                    self._optimizer_of(master).state[master] = {
                        name.partition(".")[2]: self._to_device(name, state[name], master) for name in names
                    }

    def _optimizer_of(self, master: Tensor) -> torch.optim.Optimizer:
        """Return the optimizer that updates a parameter."""
        found = (one for one in self.inner for group in one.param_groups if any(p is master for p in group["params"]))
        return next(found)

    @staticmethod
    def _to_device(name: str, value: Tensor, master: Tensor) -> Tensor:
        """Copy a moment to its parameter's device; torch keeps step counts on the host unless it is fused."""
        if name.endswith(".step") and master.device.type != "cuda":
            return value.clone()
        return value.to(master.device).clone()


def _is_weight_matrix(x: Tensor) -> bool:
    return x.dim() == 2 and max(x.shape) < MUON_MAX_ASPECT * min(x.shape)
