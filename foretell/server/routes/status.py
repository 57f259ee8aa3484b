"""The endpoints that tell of the server: what it serves, how it is, how it goes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from foretell.server.memory_report import resident
from foretell.server.openai.responses import ModelCard, ModelList, Standing, Version
from foretell.server.routes.generate import some
from foretell.server.service import Service
from foretell.version import VERSION

if TYPE_CHECKING:
    from foretell.server.service import Service


def info(service: Service) -> dict[str, Any]:
    """All of it."""
    service.engine.deliver_pending()
    assembly = service.assembly
    return {
        "version": VERSION,
        "model": service.engine_config.model,
        "revision": service.engine_config.revision,
        "served_model_names": list(service.names),
        "max_model_len": service.desk.context,
        "drafter": assembly.engine.drafter.name,
        "drafters": list(assembly.engine.drafter.drafters),
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
    on, words = service.metrics.controller.speculation_state
    drafters, decided = service.metrics.totals.drafters.items(), service.metrics.controller.decision_counts.items()
    return {
        "on": on,
        "reason": words,
        "drafters": {name: {"drafted": drafted, "accepted": accepted} for name, (drafted, accepted) in drafters},
        "decisions": [
            {"drafter": drafter, "decision": decision, "reason": reason, "steps": steps}
            for (drafter, decision, reason), steps in decided
        ],
    }


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WELL: dict[int | str, dict[str, Any]] = {
    200: {"model": Standing},
    503: {"model": Standing, "description": "Not well; `reason` says why"},
}


def telling_routes(service: Service) -> APIRouter:
    """Models, metrics, health and the like."""
    router = APIRouter(tags=["telling"])
    _add_models(router, service)
    _add_standing(router, service)
    _add_figures(router, service)
    return router


def _add_models(router: APIRouter, service: Service) -> None:
    created = int(time.time())

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=created,
            owned_by="foretell",
            root=service.engine_config.model,
            max_model_len=service.desk.context,
            drafter=service.assembly.engine.drafter.name,
        )

    @router.get("/v1/models", responses=some(401, 403))
    async def models() -> ModelList:
        """The names the model is served under."""
        return ModelList(object="list", data=[card(name) for name in service.names])

    @router.get("/v1/models/{name:path}", responses=some(401, 403, 404))
    async def model(name: str) -> ModelCard:
        """One of them."""
        return card(service.check_model(name))


def _add_standing(router: APIRouter, service: Service) -> None:
    @router.get("/health", response_model=None, responses=WELL)
    async def health() -> Response:
        """Whether the engine works."""
        return _standing(service.problem)

    @router.get("/ready", response_model=None, responses=WELL)
    async def ready() -> Response:
        """Whether new requests are taken."""
        return _standing("the server is about to stop" if service.engine.draining else service.problem)


def _add_figures(router: APIRouter, service: Service) -> None:
    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        service.engine.deliver_pending()
        text = service.metrics.expose(service.config.metrics_names, service.engine.load)
        return Response(text, media_type=METRICS_TYPE)

    @router.get("/version")
    async def version() -> Version:
        """Of this server."""
        return Version(version=VERSION)

    @router.get("/server_info", responses=some(401, 403))
    async def server_info() -> dict[str, Any]:
        """What is served, with what memory, and how it goes."""
        return info(service)


def _standing(reason: str | None) -> Response:
    status = "ok" if reason is None else "unavailable"
    return JSONResponse({"status": status, "reason": reason}, 200 if reason is None else 503)
