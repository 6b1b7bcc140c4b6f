"""What a command says when it cannot do its work (what, which, what to do next), and its exit status.

Every command runs inside `reported`, which turns the errors of this package and of the client into one message on
standard error (JSON with --json). Exit status: 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Final

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130


class CommandError(Exception):
    """A command failed; `hint` says what to do next."""

    def __init__(self, message: str, hint: str = "", *, code: str = "failed", status: int = FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        self.status = status


@contextlib.contextmanager
def reported(*, as_json: bool = False) -> Iterator[None]:
    """Ends the process with the right status after saying why."""
    from control_plane.resumption import ClientError

    try:
        yield
        sys.stdout.flush()
    except CommandError as error:
        _end(error, as_json)
    except ClientError as error:
        _end(explain(error), as_json)
    except KeyboardInterrupt:
        _end(CommandError("interrupted", code="interrupted", status=INTERRUPTED), as_json)
    except BrokenPipeError:
        # The reader of our output left; the interpreter must not complain about it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(FAILED) from None


def explain(error: Exception) -> CommandError:
    """A client's error in a command's words."""
    from control_plane.resumption import HttpError, StreamLost, Unreachable

    if isinstance(error, Unreachable):
        hint = "start the service with `stoker up`, or say where it is with --data-dir, --url or STOKER_URL"
        return CommandError(str(error), hint, code="unreachable")
    if isinstance(error, StreamLost):
        hint = f"what was printed stands; the rest can still be had: stoker resume {error.request_id} {error.cursor}"
        return CommandError(str(error), hint if error.request_id else "", code="stream_lost")
    if isinstance(error, HttpError):
        hints = {
            401: "give a key that works: STOKER_API_KEY, or --data-dir for this machine's admin key",
            403: "this needs an admin key: see `stoker keys ls`",
            404: "see what there is with `stoker ls` and `stoker ps`",
            429: "the function is saturated: try again, or raise scaling.max_replicas",
            503: "try again; `stoker ps` and `stoker logs NAME` show why it is not ready",
        }
        where = f" ({error.param})" if error.param and error.param not in error.message else ""
        hint = hints.get(error.status, "")
        if error.retry_after_s:
            hint = f"the service asks to wait {error.retry_after_s:g} s; {hint}"
        return CommandError(f"{error.message}{where}", hint, code=error.code or f"http_{error.status}")
    return CommandError(str(error))


def _end(error: CommandError, as_json: bool) -> None:
    sys.stdout.flush()
    if as_json:
        told = {"code": error.code, "message": error.message, "hint": error.hint}
        print(json.dumps({"error": told}, ensure_ascii=False), file=sys.stderr)
    else:
        print(f"stoker: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  next: {error.hint}", file=sys.stderr)
    raise SystemExit(error.status)
