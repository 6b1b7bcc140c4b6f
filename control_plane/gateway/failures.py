"""How a request's recorded error becomes an HTTP answer or the last event of its stream."""

from __future__ import annotations

from control_plane.errors import (
    Internal,
    InvalidRequest,
    KeyDeleted,
    ModelLoading,
    ModelUnusable,
    NotFound,
    Saturated,
    StokerError,
    Unavailable,
)
from control_plane.records import OutcomeError, RequestState
from control_plane.request_log import End, RequestLog


class TimedOut(StokerError):
    """One of the request's own limits passed; the same request would meet it again."""

    http_status = 504
    type = "server_error"
    default_code = "timeout"
    retry = False


class RequestCancelled(StokerError):
    """Not a fault: whoever reads on learns that the work was stopped."""

    http_status = 409
    type = "invalid_request_error"
    default_code = "request_cancelled"
    retry = False


class Retryable(Unavailable):
    default_code = "unavailable"


def failure_of(end: End) -> StokerError | None:
    """None for a request that has its whole answer."""
    if end.state is RequestState.DONE:
        return None
    if end.error is None:
        if end.state is RequestState.CANCELLED:
            return RequestCancelled("the request was cancelled")
        return Internal(f"the request ended as {end.state} without a reason")
    return failure(end.error)


def pause_of(log: RequestLog, cursor: int) -> StokerError | None:
    """Why a reader at this place may not wait any longer; its request is not over."""
    if log.paused is None or log.end is not None or log.last_seq > cursor:
        return None
    return failure(log.paused)


def failure(error: OutcomeError) -> StokerError:
    message, code = error.message, error.code
    match error.http_status:
        case 400:
            return InvalidRequest(message, code=code, param=error.param)
        case 404:
            return NotFound(message, code=code)
        case 409:
            return RequestCancelled(message, code=code)
        case 410:
            return KeyDeleted(message, code=code)
        case 429:
            return Saturated(message, code=code)
        case 503 if code == "model_loading":
            return ModelLoading(message, code=code, retry_after_s=5.0)
        case 503 if error.retry:
            return Retryable(message, code=code, retry_after_s=1.0)
        case 503:
            return ModelUnusable(message, code=code)
        case 504:
            return TimedOut(message, code=code)
        case _:
            return Internal(message, code=code)
