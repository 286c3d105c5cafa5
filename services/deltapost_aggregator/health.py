"""HealthServer: `/healthz` says that the process runs and reads, `/readyz` what is wrong, in words.

`/readyz` also lists under `holds` the fragments that this process serves, and under `waiting` why each open
round does not close yet; that alone is nothing wrong.
"""

from __future__ import annotations

import threading
import time

import uvicorn
from fastapi import FastAPI, Response

from deltapost import __version__
from deltapost.settings import listen
from deltapost_aggregator.context import Health

#: Seconds without a successful read of any stream after which the process no longer counts as healthy.
SILENT_SECONDS = 60.0


def health_app(health: Health) -> FastAPI:
    """The two endpoints as an ASGI application."""
    app = FastAPI(title="deltapost aggregator", version=__version__, docs_url=None, redoc_url=None)

    @app.get("/healthz")
    def healthz(response: Response) -> dict[str, object]:
        silent = time.monotonic() - health.last_read
        healthy = silent < SILENT_SECONDS
        response.status_code = 200 if healthy else 503
        return {"healthy": healthy, "seconds_since_read": round(silent, 3), "version": __version__}

    @app.get("/readyz")
    def readyz(response: Response) -> dict[str, object]:
        problems = health.problems()
        response.status_code = 503 if problems else 200
        reason = "; ".join(f"{component}: {what}" for component, what in problems.items())
        return {
            "ready": not problems,
            "reason": reason or "everything answers",
            "problems": problems,
            "waiting": health.waiting(),
            "holds": health.held(),
        }

    return app


class HealthServer:
    """Serves `health_app` from a thread of its own until `stop`. Raises ConfigurationError: address taken."""

    def __init__(self, health: Health, host: str, port: int) -> None:
        self._socket = listen(host, port, setting="DELTAPOST_AGGREGATOR_HEALTH_PORT")
        config = uvicorn.Config(health_app(health), log_level="warning", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="health", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()
