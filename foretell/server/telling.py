"""The endpoints that tell of the server: what it serves, how it is, how it goes."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from foretell.version import VERSION

from .info import info
from .protocol_replies import ModelCard, ModelList, Standing, Version
from .service import Service
from .writing import some

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
        service.engine.catch_up()
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
