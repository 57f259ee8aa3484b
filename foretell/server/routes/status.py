"""The status endpoints: models, health, metrics, version and server info."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse, Response

from foretell.server.memory_report import process_memory
from foretell.server.openai.responses import HealthStatus, ModelCard, ModelList, VersionInfo
from foretell.server.openai.server_info import ServerInfo
from foretell.server.routes.generate import error_responses
from foretell.version import VERSION

if TYPE_CHECKING:
    from foretell.server.service import Service


def server_info_body(service: Service) -> dict[str, Any]:
    """Return the body of /server_info."""
    service.engine.deliver_pending()
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
        "reasoning": service.preprocessor.returns_reasoning,
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
    """Return the current load, and the totals since the start."""
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
    """Return the counts of each drafter, and the controller's decisions with their reasons."""
    decided, drafters = service.metrics.decisions, service.metrics.totals.drafters.items()
    return {
        "on": decided.on,
        "reason": decided.reason,
        "drafters": {name: {"drafted": drafted, "accepted": accepted} for name, (drafted, accepted) in drafters},
        "decisions": [
            {"drafter": drafter, "decision": decision, "reason": reason, "steps": steps}
            for (drafter, decision, reason), steps in decided.counts.items()
        ],
    }


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HEALTH_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": HealthStatus},
    503: {"model": HealthStatus, "description": "Unhealthy; `reason` says why"},
}


def status_routes(service: Service) -> APIRouter:
    """Return the routes of models, health, metrics, version and server info."""
    router = APIRouter(tags=["status"])
    _add_model_routes(router, service)
    _add_health_routes(router, service)
    _add_metrics_routes(router, service)
    return router


def _add_model_routes(router: APIRouter, service: Service) -> None:
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
        """List the names under which the model is served."""
        return ModelList(object="list", data=[card(name) for name in service.model_names])

    @router.get("/v1/models/{name:path}", responses=error_responses(401, 403, 404))
    async def model(name: Annotated[str, Path(description="A name that /v1/models lists.")]) -> ModelCard:
        """Describe one model."""
        return card(service.check_model(name))


def _add_health_routes(router: APIRouter, service: Service) -> None:
    @router.get("/health", response_model=None, responses=HEALTH_RESPONSES)
    async def health() -> Response:
        """Report whether the engine works."""
        return _health_response(service.unhealthy_reason)

    @router.get("/ready", response_model=None, responses=HEALTH_RESPONSES)
    async def ready() -> Response:
        """Report whether new requests are accepted."""
        return _health_response("the server is shutting down" if service.engine.draining else service.unhealthy_reason)


def _add_metrics_routes(router: APIRouter, service: Service) -> None:
    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Expose metrics in Prometheus's text format."""
        service.engine.deliver_pending()
        text = service.metrics.expose(service.config.metrics_names, service.engine.load)
        return Response(text, media_type=METRICS_TYPE)

    @router.get("/version")
    async def version() -> VersionInfo:
        """Return the version of this server."""
        return VersionInfo(version=VERSION)

    @router.get(
        "/server_info", response_model=None, responses={200: {"model": ServerInfo}, **error_responses(401, 403)}
    )
    async def server_info() -> dict[str, Any]:
        """Describe the model, the settings, the memory and the speculation statistics."""
        return server_info_body(service)


def _health_response(reason: str | None) -> Response:
    status = "ok" if reason is None else "unavailable"
    return JSONResponse({"status": status, "reason": reason}, 200 if reason is None else 503)
