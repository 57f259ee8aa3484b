"""The served model as Ollama's API describes models: /api/tags, /api/ps and /api/show."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from foretell.server.ollama.requests import LATEST
from foretell.version import VERSION

if TYPE_CHECKING:
    from foretell.server.service import Service

OLLAMA_VERSION = "0.12.6"  # the version of Ollama's API that this follows; clients compare it
NEVER = "9999-12-31T23:59:59Z"  # the model stays loaded
ARCHITECTURE = "foretell"  # the prefix of `model_info`; clients look for ARCHITECTURE.context_length


class OllamaModels:
    """Descriptions of the served model under each of its names."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._started = datetime.now(UTC).isoformat().replace("+00:00", "Z")

    def served_name(self, name: str | None) -> str:
        """Return the served name that a client means: the tag :latest may be added."""
        if name is not None and name not in self.service.model_names:
            name = name.removesuffix(LATEST)
        return self.service.check_model(name)

    def version(self) -> dict[str, Any]:
        return {"version": OLLAMA_VERSION, "foretell": VERSION}

    def tags(self) -> dict[str, Any]:
        """Return the list of /api/tags."""
        return {"models": [self._entry(name) | {"modified_at": self._started} for name in self.service.model_names]}

    def running(self) -> dict[str, Any]:
        """Return the list of /api/ps."""
        context = self.service.preprocessor.max_model_len
        loaded = {"expires_at": NEVER, "size_vram": 0, "context_length": context}
        return {"models": [self._entry(name) | loaded for name in self.service.model_names]}

    def show(self, name: str) -> dict[str, Any]:
        """Return the description of /api/show."""
        service = self.service
        preprocessor = service.preprocessor
        defaults = service.assembly.sampling_defaults
        capabilities = ["completion"]
        capabilities += ["tools"] if preprocessor.tool_parser is not None else []
        capabilities += ["insert"] if preprocessor.tokenizer.fim is not None else []
        capabilities += ["thinking"] if preprocessor.returns_reasoning else []
        return {
            "modelfile": f"FROM {name}",
            "parameters": "\n".join(f"{key} {value}" for key, value in defaults.items()),
            "template": service.assembly.tokenizer.chat_template or "",
            "details": self._details(),
            "model_info": {
                "general.architecture": ARCHITECTURE,
                "general.basename": name,
                f"{ARCHITECTURE}.context_length": preprocessor.max_model_len,
            },
            "capabilities": capabilities,
            "modified_at": self._started,
        }

    def _entry(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "size": self.service.memory.weights,
            "digest": self._digest(),
            "details": self._details(),
        }

    def _digest(self) -> str:
        """Return a digest of the model's name and revision: files of any size are served, so they are not hashed."""
        config = self.service.engine_config
        return hashlib.sha256(f"{config.model} {config.revision}".encode()).hexdigest()

    def _details(self) -> dict[str, Any]:
        model = self.service.engine_config.model
        return {
            "parent_model": "",
            "format": "gguf" if model.endswith(".gguf") else "safetensors",
            "family": ARCHITECTURE,
            "families": [ARCHITECTURE],
            "parameter_size": "",
            "quantization_level": self.service.engine_config.quantization or "none",
        }
