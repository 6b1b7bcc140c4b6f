"""What the server refuses with: a `Status` object, its HTTP code and its reason.

Reasons and codes are those of apimachinery (`pkg/api/errors/errors.go`, `pkg/apis/meta/v1/types.go`, StatusReason).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class ApiError(Exception):
    """One refusal, with everything that the `Status` says of it."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: dict[str, Any] | None = None,
        *,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}
        self.retry_after_s = retry_after_s

    def status(self) -> dict[str, Any]:
        details = dict(self.details)
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if details:
            body["details"] = details
        return body


@dataclass(frozen=True, slots=True)
class FieldFault:
    """One field that is wrong; `kind` is a CauseType of apimachinery (`FieldValueInvalid`, `FieldValueRequired`...)."""

    path: str
    message: str
    kind: str = "FieldValueInvalid"
    value: Any = field(default=None, compare=False)

    def text(self) -> str:
        match self.kind:
            case "FieldValueRequired":
                return f"{self.path}: Required value" + (f": {self.message}" if self.message else "")
            case "FieldValueForbidden":
                return f"{self.path}: Forbidden: {self.message}"
            case "FieldValueNotSupported":
                return f"{self.path}: Unsupported value: {_shown(self.value)}: {self.message}"
            case "FieldValueDuplicate":
                return f"{self.path}: Duplicate value: {_shown(self.value)}"
            case _:
                return f"{self.path}: Invalid value: {_shown(self.value)}: {self.message}"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return '"object"'
    if isinstance(value, list):
        return '"array"'
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def not_found(plural: str, group: str, name: str) -> ApiError:
    resource = f"{plural}.{group}" if group else plural
    return ApiError(404, "NotFound", f'{resource} "{name}" not found', {"name": name, "group": group, "kind": plural})


def unknown_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(plural: str, group: str, name: str) -> ApiError:
    resource = f"{plural}.{group}" if group else plural
    return ApiError(
        409, "AlreadyExists", f'{resource} "{name}" already exists', {"name": name, "group": group, "kind": plural}
    )


def conflict(plural: str, group: str, name: str, why: str = "") -> ApiError:
    resource = f"{plural}.{group}" if group else plural
    why = why or ("the object has been modified; please apply your changes to the latest version and try again")
    return ApiError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {resource} "{name}": {why}',
        {"name": name, "group": group, "kind": plural},
    )


def invalid(kind: str, group: str, name: str, faults: list[FieldFault]) -> ApiError:
    qualified = f"{kind}.{group}" if group else kind
    texts = [fault.text() for fault in faults]
    joined = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    causes = [
        {"reason": fault.kind, "message": fault.text().removeprefix(fault.path + ": "), "field": fault.path}
        for fault in faults
    ]
    return ApiError(
        422,
        "Invalid",
        f'{qualified} "{name}" is invalid: {joined}',
        {"name": name, "group": group, "kind": kind, "causes": causes},
    )


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def forbidden(message: str, plural: str = "", group: str = "", name: str = "") -> ApiError:
    return ApiError(403, "Forbidden", message, {"name": name, "group": group, "kind": plural} if plural else None)


def expired(message: str = "The resourceVersion for the provided watch is too old.") -> ApiError:
    return ApiError(410, "Expired", message)


def method_not_allowed() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def too_many_requests(message: str, retry_after_s: int | None = None) -> ApiError:
    return ApiError(429, "TooManyRequests", message, retry_after_s=retry_after_s)
