"""The endpoints that tell of the server: what it serves, how it is, how it goes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from foretell.server.memory_report import process_memory
from foretell.server.openai.responses import HealthStatus, ModelCard, ModelList, VersionInfo
from foretell.server.routes.generate import error_responses
from foretell.server.service import Service
from foretell.version import VERSION

if TYPE_CHECKING:
    from foretell.server.service import Service


def info(service: Service) -> dict[str, Any]:
    """All of it."""
    service.engine.catch_up()
    assembly = service.assembly
    return {
        "version": VERSION,
        "model": service.engine_config.model,
        "revision": service.engine_config.revision,
        "served_model_names": list(service.model_names),
        "max_model_len": service.preprocessor.max_model_len,
        "drafter": assembly.engine.drafter.name,
        "drafters": list(assembly.engine.drafter.drafters),
        "max_draft": service.speculation.budget,
        "rule": service.speculation.rule,
        "rules": {"lossless": list(assembly.requests.lossless), "lossy": list(assembly.requests.lossy)},
        "sampling_defaults": dict(assembly.sampling_defaults),
        "chats": bool(assembly.tokenizer.chat_template),
        "tool_calls": service.preprocessor.tool_parser,
        "reasoning": service.preprocessor.parses_reasoning,
        "memory": _memory(service),
        "internal_states": [_state(service)],
        "speculation": _speculation(service),
    }


def _memory(service: Service) -> dict[str, int]:
    memory, now = service.memory, process_memory()
    return {
        "weights": memory.weights,
        "drafter": memory.drafter,
        "cache": memory.cache,
        "step": memory.activations,
        "program": memory.process,
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
        "texts": totals.num_finished,
        "tokens": totals.tokens,
        "drafts": totals.drafts,
        "accepted_per_position": totals.per_position,
        "step_seconds": totals.step_seconds,
        "drafting_seconds": totals.draft_seconds,
        "target_seconds": totals.target_seconds,
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
    200: {"model": HealthStatus},
    503: {"model": HealthStatus, "description": "Not well; `reason` says why"},
}


def status_routes(service: Service) -> APIRouter:
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
            max_model_len=service.preprocessor.max_model_len,
            drafter=service.assembly.engine.drafter.name,
        )

    @router.get("/v1/models", responses=error_responses(401, 403))
    async def models() -> ModelList:
        """The names the model is served under."""
        return ModelList(object="list", data=[card(name) for name in service.model_names])

    @router.get("/v1/models/{name:path}", responses=error_responses(401, 403, 404))
    async def model(name: str) -> ModelCard:
        """One of them."""
        return card(service.check_model(name))


def _add_standing(router: APIRouter, service: Service) -> None:
    @router.get("/health", response_model=None, responses=WELL)
    async def health() -> Response:
        """Whether the engine works."""
        return _standing(service.unhealthy_reason)

    @router.get("/ready", response_model=None, responses=WELL)
    async def ready() -> Response:
        """Whether new requests are taken."""
        return _standing("the server is about to stop" if service.engine.draining else service.unhealthy_reason)


def _add_figures(router: APIRouter, service: Service) -> None:
    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        service.engine.catch_up()
        text = service.metrics.expose(service.config.metrics_names, service.engine.load)
        return Response(text, media_type=METRICS_TYPE)

    @router.get("/version")
    async def version() -> VersionInfo:
        """Of this server."""
        return VersionInfo(version=VERSION)

    @router.get("/server_info", responses=error_responses(401, 403))
    async def server_info() -> dict[str, Any]:
        """What is served, with what memory, and how it goes."""
        return info(service)


def _standing(reason: str | None) -> Response:
    status = "ok" if reason is None else "unavailable"
    return JSONResponse({"status": status, "reason": reason}, 200 if reason is None else 503)
