"""Response times do not reveal other tenants' prompts."""

from __future__ import annotations

import random
from time import perf_counter

from tests.server.process import CONTEXT, ServerProcess

ROUNDS, MOST = 20, 200  # more than the first where the machine was never free for one of them
ANNA, BERTA = "anna-probe", "berta-probe"


def text(rng: random.Random) -> list[int]:
    """Return a new prompt with a long prefill."""
    return [rng.randrange(5, 200) for _ in range(CONTEXT - 8)]


def seconds(server: ServerProcess, key: str, prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    began = perf_counter()
    reply = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    taken = perf_counter() - began
    assert reply.status_code == 200, reply.text
    return taken


def test_timing_does_not_reveal_other_tenants_prompts(server: ServerProcess) -> None:
    """A tenant's own prompt is faster, which validates the probe; another tenant's is as slow as a new one."""
    rng = random.Random(7)
    own: list[float] = []
    others: list[float] = []
    new: list[float] = []

    def tells() -> tuple[bool, bool]:
        hit, cross, miss = min(own), min(others), min(new)  # what else the machine does only makes them longer
        return hit < 0.7 * miss, cross > (hit + miss) / 2

    while len(own) < ROUNDS or (tells() != (True, True) and len(own) < MOST):
        asked = text(rng)
        seconds(server, ANNA, asked)
        probes = [(own, ANNA, asked), (others, BERTA, asked), (new, BERTA, text(rng))]
        rng.shuffle(probes)  # none of them is always the first
        for times, key, prompt in probes:
            times.append(seconds(server, key, prompt))
    sees_its_own, sees_no_other = tells()
    assert sees_its_own, "the probe sees a hit"
    assert sees_no_other, "and none here"
