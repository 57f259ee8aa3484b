"""What /server_info tells: what is served, with what memory, and how it goes. Keys stay out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretell.version import VERSION

from .footprint import resident

if TYPE_CHECKING:
    from .service import Service


def info(service: Service) -> dict[str, Any]:
    """All of it."""
    service.engine.catch_up()
    assembly = service.assembly
    return {
        "version": VERSION,
        "model": service.engine_config.model,
        "revision": service.engine_config.revision,
        "served_model_names": list(service.names),
        "max_model_len": service.desk.context,
        "drafter": assembly.engine.drafter.name,
        "drafters": list(assembly.engine.drafter.arms),
        "max_draft": service.speculation.budget,
        "rule": service.speculation.rule,
        "rules": {"lossless": list(assembly.requests.lossless), "lossy": list(assembly.requests.lossy)},
        "sampling_defaults": dict(assembly.sampling_defaults),
        "chats": bool(assembly.tokenizer.chat_template),
        "tool_calls": service.desk.family,
        "reasoning": service.desk.thinks,
        "memory": _memory(service),
        "internal_states": [_state(service)],
        "speculation": _speculation(service),
    }


def _memory(service: Service) -> dict[str, int]:
    memory, now = service.footprint, resident()
    return {
        "weights": memory.weights,
        "drafter": memory.drafter,
        "cache": memory.cache,
        "step": memory.step,
        "program": memory.program,
        "total": memory.total,
        "pages": memory.pages,
        "resident": now.now,
        "resident_files": now.files,
    }


def _state(service: Service) -> dict[str, Any]:
    """How busy it is, and sums since the start."""
    totals, load = service.metrics.totals, service.engine.load
    return {
        "avg_spec_accept_length": totals.mean_acceptance_length,
        "acceptance_rate": totals.acceptance_rate,
        "speedup": service.metrics.speedup.value,
        "running": load.running,
        "waiting": load.waiting,
        "pages_held": load.pages_held,
        "preemptions": load.preemptions,
        "texts": totals.texts,
        "tokens": totals.tokens,
        "drafts": totals.drafts,
        "accepted_per_position": totals.per_position,
        "step_seconds": totals.seconds,
        "drafting_seconds": totals.drafting,
        "target_seconds": totals.running,
    }


def _speculation(service: Service) -> dict[str, Any]:
    """What each drafter did, and what the controller decided and why."""
    on, words = service.metrics.controller.standing
    drafters, decided = service.metrics.totals.drafters.items(), service.metrics.controller.decided.items()
    return {
        "on": on,
        "reason": words,
        "drafters": {name: {"drafted": drafted, "accepted": accepted} for name, (drafted, accepted) in drafters},
        "decisions": [
            {"drafter": drafter, "decision": decision, "reason": reason, "steps": steps}
            for (drafter, decision, reason), steps in decided
        ],
    }
