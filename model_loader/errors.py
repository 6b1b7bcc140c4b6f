"""What can go wrong between a model URI and tensors in memory.

    LoaderError
    ├── SourceError            the URI, its host or its files
    │   ├── SourceMissing      nothing is there
    │   ├── SourceRefused      not allowed: pattern, path, pickle formats
    │   └── SourceUnavailable  the host did not answer, or the files changed under the import
    ├── FormatError            truncated, foreign or contradictory bytes
    │   └── UnsupportedArchitecture
    ├── IntegrityError         bytes differ from what their digest promises
    ├── OutOfSpace             disk, tmpfs or the pool's budget
    ├── TextError              a text that cannot be tokenised
    ├── TemplateError          a chat template that does not compile or refuses its messages
    └── StoreError             object store
        ├── MissingObject      it has no such object
        ├── ShortObject        the object ends before what was asked for
        ├── StoreUnavailable   no answer in time, or one that says "later"
        └── StoreRefused       credentials, permission, bucket, region: somebody has to change something

`retry` says whether the same call may succeed later without anybody changing the model; `code` is stable and machine
readable. Messages name what, which and what to do next.
"""

from __future__ import annotations

import errno
from enum import StrEnum
from typing import ClassVar, Final

_SHOWN_CHARS: Final = 120


class LoaderError(Exception):
    code: ClassVar[str] = "model_error"
    retry: ClassVar[bool] = False


class SourceError(LoaderError):
    code = "model_source_error"


class SourceMissing(SourceError):
    code = "model_not_found"


class SourceRefused(SourceError):
    code = "model_refused"


class SourceUnavailable(SourceError):
    code = "model_source_unavailable"
    retry = True


class FormatError(LoaderError):
    code = "model_format_invalid"


class UnsupportedArchitecture(FormatError):
    code = "model_unsupported"


class IntegrityError(LoaderError):
    code = "model_integrity_failed"


class OutOfSpace(LoaderError):
    code = "out_of_space"
    retry = True


class TextError(LoaderError):
    code = "text_invalid"


class TemplateError(LoaderError):
    code = "chat_template_failed"


class StoreError(LoaderError):
    code = "object_store_error"
    retry = True


class MissingObject(StoreError):
    code = "object_missing"
    retry = False


class ShortObject(StoreError):
    code = "object_short"
    retry = False


class StoreProblem(StrEnum):
    """Why a store cannot be used, for programs; the message says it to people."""

    UNREACHABLE = "unreachable"
    WRONG_CREDENTIALS = "wrong_credentials"
    EXPIRED_CREDENTIALS = "expired_credentials"
    NO_PERMISSION = "no_permission"
    MISSING_BUCKET = "missing_bucket"
    WRONG_REGION = "wrong_region"
    FULL = "full"
    UNWRITABLE = "unwritable"
    OTHER = "other"


class StoreUnavailable(StoreError):
    code = "object_store_unavailable"


class StoreRefused(StoreError):
    code = "object_store_refused"
    retry = False

    def __init__(self, message: str, problem: StoreProblem = StoreProblem.OTHER) -> None:
        super().__init__(message)
        self.problem = problem


_KINDS: dict[str, type[LoaderError]] = {
    kind.code: kind
    for kind in (
        LoaderError, SourceError, SourceMissing, SourceRefused, SourceUnavailable, FormatError,
        UnsupportedArchitecture, IntegrityError, OutOfSpace, TextError, TemplateError, StoreError, MissingObject,
        ShortObject, StoreUnavailable, StoreRefused,
    )
}  # fmt: skip


def shown(value: object) -> str:
    """How a value out of somebody else's file stands in a message: `repr`, cut to a line."""
    if isinstance(value, str | bytes):
        text = repr(value[: _SHOWN_CHARS + 1])
    elif isinstance(value, list | tuple | dict):
        text = f"a {type(value).__name__} of {len(value)} items" if len(value) > 16 else repr(value)
    else:
        text = repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "a number of many digits"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def error_from_code(code: str, message: str) -> LoaderError:
    """The error a subprocess reported by its code; an unknown code becomes a plain `LoaderError`."""
    return _KINDS.get(code, LoaderError)(message)


def from_os_error(error: OSError, what: str) -> LoaderError:
    """Maps what the operating system said while writing `what`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutOfSpace(f"no space left while writing {what}: free some, or give more")
    return LoaderError(f"cannot write {what}: {error.strerror or error}")


def problem_of(error: LoaderError | OSError) -> StoreProblem:
    """What kind of trouble with a store an error tells of."""
    if isinstance(error, StoreRefused):
        return error.problem
    if isinstance(error, OutOfSpace):
        return StoreProblem.FULL
    if isinstance(error, StoreUnavailable):
        return StoreProblem.UNREACHABLE
    return StoreProblem.OTHER
