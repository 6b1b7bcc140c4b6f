"""Every way the control plane says no: one tree, each class with its HTTP status, OpenAI code and retry advice.

    StokerError
      InvalidRequest 400   Unauthenticated 401   Forbidden 403   NotFound 404   Conflict 409 (Fenced)
      KeyDeleted 410   TooLarge 413   Unprocessable 422   Saturated 429 (RateExceeded, BudgetExceeded, FirstTokenLate)
      Internal 500 (Damaged)
      Unavailable 503 (StorageUnavailable (LeaseLapsed), Elsewhere,
        ObjectStoreUnavailable, ModelLoading, FunctionDrained, ModelUnusable)

`control_plane.api.middleware` maps the tree to HTTP in one place; `body()` is also what an SSE stream sends once its
200 is out. Limits: messages are shown to clients, so they name the field or object and what to do, never a path or a
traceback.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

RETRY_AFTER_MAX_S: Final = 120.0


class StokerError(Exception):
    """`retry`: whether sending the same request again may help; None leaves it to the client's own rule."""

    http_status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"
    retry: ClassVar[bool | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error object; all four keys are required by its schema."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            # NOTE: OpenAI's clients obey at most 120 s and give up above; they prefer the header in milliseconds.
            after_s = min(max(self.retry_after_s, 0.001), RETRY_AFTER_MAX_S)
            headers["Retry-After"] = str(math.ceil(after_s))
            headers["retry-after-ms"] = str(math.ceil(after_s * 1000))
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        return headers


class InvalidRequest(StokerError):
    http_status = 400
    type = "invalid_request_error"
    default_code = "invalid_request"


class Unauthenticated(StokerError):
    http_status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer", **super().headers()}


class Forbidden(StokerError):
    http_status = 403
    type = "permission_error"
    default_code = "forbidden"


class NotFound(StokerError):
    http_status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class Conflict(StokerError):
    """Clients retry 409 by default, which cannot help here: hence the explicit advice."""

    http_status = 409
    type = "invalid_request_error"
    default_code = "conflict"
    retry = False


class Fenced(Conflict):
    """A write under an epoch or owner that no longer holds the request; its author must stop working on it."""

    default_code = "fenced"


class KeyDeleted(StokerError):
    """The tenant's key was deleted, and with it what it had sealed: nobody can read that any more."""

    http_status = 410
    type = "invalid_request_error"
    default_code = "key_deleted"
    retry = False


class TooLarge(StokerError):
    http_status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class Unprocessable(StokerError):
    http_status = 422
    type = "invalid_request_error"
    default_code = "unprocessable"


class Saturated(StokerError):
    """The queue is full or a limit of the tenant is reached: later, the same request may be taken."""

    http_status = 429
    type = "rate_limit_error"
    default_code = "saturated"
    retry = True

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = 1.0,
    ) -> None:
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)


class RateExceeded(Saturated):
    """A minute's budget of a tenant or a key is spent."""

    default_code = "rate_limit_exceeded"


class BudgetExceeded(Saturated):
    """A longer budget is spent; only the next period, or another budget, helps."""

    default_code = "budget_exceeded"
    retry = False


class FirstTokenLate(Saturated):
    """The first token would come later than the function's objective allows: refused before anything was spent on it.
    `retry_after_s` is when a request like it would be taken."""

    default_code = "first_token_objective"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = 1.0,
        predicted_s: float = 0.0,
    ) -> None:
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)
        self.predicted_s = predicted_s

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "x-stoker-first-token-s": f"{self.predicted_s:.3f}"}


class Internal(StokerError):
    """A fault of ours; details are in the log under the request id."""


class Damaged(Internal):
    """Something stored is not what was written: it does not open with its key, or cannot be read. Only that one thing
    is lost; who reads many goes on with the others."""

    default_code = "stored_data_damaged"
    retry = False


class Unavailable(StokerError):
    http_status = 503
    type = "server_error"
    default_code = "unavailable"
    retry = True


class StorageUnavailable(Unavailable):
    """The database could not write or read (full disk, unwritable directory). What was accepted is kept."""

    default_code = "storage_unavailable"
    unclear = False
    """The write may have happened all the same: the database went away before it answered."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = 5.0,
    ) -> None:
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)


class ObjectStoreUnavailable(Unavailable):
    """The function's spec says that it needs the object store, and that cannot be used now."""

    default_code = "object_store_unavailable"


class LeaseLapsed(StorageUnavailable):
    """This gateway could not renew its lease: others may be taking over what it has."""

    default_code = "gateway_lapsed"

    def __init__(
        self,
        message: str = "this gateway cannot renew its lease and takes and writes nothing until it can; ask another",
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = 1.0,
    ) -> None:
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)


class Elsewhere(Unavailable):
    """The request is known and another gateway works on it: `gateway.relay` reads it there for the client."""

    default_code = "with_another_gateway"

    request_id = ""
    owner = ""
    cursor: int | None = None
    """How far a stream that began here was read; None: nothing was sent yet."""

    @classmethod
    def of(cls, request_id: str, owner: str = "", cursor: int | None = None) -> Elsewhere:
        error = cls(f"{request_id} is with another gateway; try again", retry_after_s=1.0)
        error.request_id, error.owner, error.cursor = request_id, owner, cursor
        return error


class ModelLoading(Unavailable):
    """No replica is ready and the client asked not to wait; `retry_after_s` comes from measured starts."""

    default_code = "model_loading"


class FunctionDrained(Unavailable):
    """An operator has drained the function; what it had accepted waits, new requests are told to come back."""

    default_code = "function_drained"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = 30.0,
    ) -> None:
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)


class ModelUnusable(Unavailable):
    """The function's checkpoint cannot be served (corrupt, refused, unsupported); only a new revision helps."""

    default_code = "model_unusable"
    retry = False
