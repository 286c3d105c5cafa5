"""The ledger service as an ASGI application: JSON only, read only, no state but the ledger's pool.

Failure modes. While the database does not answer or has another release's schema, every endpoint but
`/healthz` says so in words with status 503; it goes on by itself once that ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from deltapost import __version__
from deltapost.errors import LedgerError, WrongRevision
from deltapost.ledger.engine import Ledger
from deltapost_ledger.routes import build_routes

__all__ = ["create_app"]

#: Ids and details are what strangers chose: no browser may take an answer for anything but what it is.
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'self'",
    "Cache-Control": "no-store",
}


def create_app(ledger: Ledger) -> FastAPI:
    """The application over an opened ledger, which the caller closes."""
    # The interactive pages would load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(title="deltapost ledger", version=__version__, docs_url=None, redoc_url=None)

    @app.middleware("http")
    async def harden(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await proceed(request)
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(LedgerError)
    async def unavailable(_request: Request, error: LedgerError) -> JSONResponse:
        passes = error.retryable or isinstance(error, WrongRevision)
        return JSONResponse({"detail": str(error)}, status_code=503 if passes else 500)

    app.include_router(build_routes(ledger))
    return app
