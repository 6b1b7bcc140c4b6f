"""The one place where exceptions become HTTP: OpenAI's error body, `x-request-id`, `Retry-After`, `x-should-retry`.

`request["request_id"]` is set before the handler runs; a handler may replace it by its own public id.
Limits: a stream that was already started cannot change its status; its handler sends `error.body()` as an event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import warnings
from collections.abc import Awaitable, Callable

from aiohttp import web

from control_plane.errors import Internal, InvalidRequest, NotFound, StokerError, TooLarge

logger = logging.getLogger(__name__)

# Typed keys for requests exist from aiohttp 3.14 on only; until that is the least, a plain one has to do.
warnings.filterwarnings("ignore", category=web.NotAppKeyWarning)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MethodNotAllowed(StokerError):
    http_status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


def error_response(error: StokerError, request_id: str) -> web.Response:
    return web.Response(
        status=error.http_status,
        body=json.dumps(error.body()).encode(),
        content_type="application/json",
        headers={"x-request-id": request_id, **error.headers()},
    )


def _translated(request: web.Request, error: web.HTTPException) -> StokerError:
    if error.status == 404:
        return NotFound(f"there is no {request.method} {request.path}")
    if error.status == 405:
        return MethodNotAllowed(f"{request.path} does not take {request.method}")
    if error.status == 413:
        return TooLarge("the request body exceeds what this server takes")
    if 400 <= error.status < 500:
        return InvalidRequest(error.text or error.reason)
    return Internal(error.text or error.reason)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    request["request_id"] = "req_" + secrets.token_hex(16)
    try:
        response = await handler(request)
    except StokerError as error:
        return error_response(error, request["request_id"])
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_response(_translated(request, error), request["request_id"])
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        logger.exception(
            "event=unhandled method=%s path=%s request_id=%s", request.method, request.path, request["request_id"]
        )
        return error_response(
            Internal("an internal error; the server's log has it under this request id"), request["request_id"]
        )
    if not response.prepared:
        response.headers.setdefault("x-request-id", request["request_id"])
    return response
