"""Runs the application in this process, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from foretell.build.engine_builder import Assembly
from foretell.config import EngineConfig, SpeculationConfig
from foretell.server.app import create_app
from foretell.server.config import ServerConfig
from foretell.server.service import Service

Scenario = Callable[[Service, httpx.AsyncClient], Coroutine[Any, Any, None]]


def run_app(assembly: Assembly, scenario: Scenario, **settings: Any) -> None:
    """Run a scenario with the application and an HTTP client."""

    async def scene() -> None:
        config = ServerConfig(**settings)
        service = Service(assembly, config, EngineConfig(model="tiny"), SpeculationConfig())
        app = create_app(service)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await scenario(service, client)

    asyncio.run(scene())
