"""The backend of programs that are run without naming one."""

from __future__ import annotations

from foretell.errors import ForetellError

from .backend import Backend


class DefaultBackend:
    """Set once for a process, as SGLang's programs expect: they do not pass a backend along."""

    def __init__(self) -> None:
        self._backend: Backend | None = None

    def set(self, backend: Backend) -> None:
        """Programs run on it from now on; the one before stays as it is."""
        if not isinstance(backend, Backend):
            raise TypeError(f"a backend is fp.Engine(...) or fp.RuntimeEndpoint(url), not {backend!r}")
        self._backend = backend

    def get(self) -> Backend:
        if self._backend is None:
            raise ForetellError(
                "no backend is set; call fp.set_default_backend(fp.Engine()), or with a server "
                'fp.set_default_backend(fp.RuntimeEndpoint("http://127.0.0.1:8000"))'
            )
        return self._backend


DEFAULT = DefaultBackend()


def set_default_backend(backend: Backend) -> None:
    """Run programs on `backend` where none is named."""
    DEFAULT.set(backend)
