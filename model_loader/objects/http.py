"""The object store of a control plane that keeps its own, over HTTP: what slots without a bucket read and write.

    GET, HEAD, PUT, DELETE  /internal/v1/store/objects/KEY      GET  /internal/v1/store/list?prefix=&after=&limit=

One request an operation, since the other side is near: a read is of one version, and whole or an error; a write carries
its CRC32C and is answered after fsync. Retries, deadline and breaker are the guard's, as for S3. The token comes from
`STOKER_STORE_TOKEN`, since a URI holds no credentials. Limits: plain HTTP within a cluster; several slots share what
one control plane moves.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import google_crc32c
import numpy as np

from model_loader.errors import (
    LoaderError,
    MissingObject,
    ShortObject,
    SourceRefused,
    StoreError,
    StoreProblem,
    StoreRefused,
    error_from_code,
)
from model_loader.errors import StoreUnavailable as Unavailable
from model_loader.objects.location import TOKEN_VARIABLE
from model_loader.objects.protocol import CHECK_PREFIX, Buffer, ObjectInfo, check_key
from model_loader.objects.resilience import DEFAULT_LIMITS, Deadline, Guard, Limits
from model_loader.objects.stats import StoreStats
from model_loader.objects.transport import Answer, Transport

SCHEME: Final = "http+stoker"
OBJECTS_PATH: Final = "/internal/v1/store/objects/"
LIST_PATH: Final = "/internal/v1/store/list"
CRC_HEADER: Final = "x-stoker-crc32c"
STORE_HEADER: Final = "x-stoker-store"
"""On every answer of a control plane that serves its store."""
PAGE_KEYS: Final = 1000
CHECK_S: Final = 10.0
_TOLD_BYTES: Final = 4096


def parse_address(uri: str) -> str:
    """`http+stoker://HOST:PORT` as the URL to ask. Raises SourceRefused."""
    parts = urlsplit(uri)
    try:
        port = parts.port
    except ValueError:
        port = None
    if "@" in parts.netloc:
        raise SourceRefused(f"object store {parts.scheme}://{parts.hostname}: a URI holds no credentials; give the "
                            f"token as {TOKEN_VARIABLE}")  # fmt: skip
    if parts.scheme != SCHEME or not parts.hostname or not port or parts.path not in ("", "/") or parts.query:
        raise SourceRefused(f"object store {uri!r} is not usable: {SCHEME}://HOST:PORT is needed")
    return f"http://{parts.netloc}"


class HttpStore:
    """Connects at the first operation."""

    def __init__(
        self, uri: str, limits: Limits = DEFAULT_LIMITS, *, token: str | None = None, guard: Guard | None = None
    ) -> None:
        self._base = parse_address(uri)
        self.uri = uri.rstrip("/")
        self.stats = StoreStats()
        self._given_token = token
        self._guard = guard or Guard(self.stats, limits)
        self._transport = Transport()

    @property
    def _token(self) -> str:
        """That of the environment may be replaced while this is in use."""
        return os.environ.get(TOKEN_VARIABLE, "") if self._given_token is None else self._given_token

    # --- reading --------------------------------------------------------------------------------------------------

    def get(self, key: str, offset: int = 0, length: int | None = None, *, within_s: float | None = None) -> bytes:
        path = _path(key)
        if offset < 0 or (length is not None and length < 0):
            raise ShortObject(f"object {key} has no byte {min(offset, length or 0)}")
        if length:
            result = bytearray(length)
            self.get_into(key, offset, memoryview(result), within_s=within_s)
            return bytes(result)
        deadline = self._guard.deadline(within_s)
        if length == 0:
            return _at_most_the_end(key, offset, self._head(key, path, deadline))
        result = self._guard.run("get", deadline, lambda: self._get_rest(path, key, offset, deadline))
        self.stats.add_bytes("get", len(result))
        return bytes(result)

    def get_into(self, key: str, offset: int, view: memoryview, *, within_s: float | None = None) -> None:
        view = view.cast("B")
        if not len(view):
            self.get(key, offset, 0, within_s=within_s)
            return
        path = _path(key)
        if offset < 0:
            raise ShortObject(f"object {key} has no byte {offset}")
        deadline = self._guard.deadline(within_s, len(view))
        self._guard.run("get", deadline, lambda: self._get_range(path, key, offset, view, deadline), len(view))

    def _get_range(self, path: str, key: str, offset: int, view: memoryview, deadline: Deadline) -> None:
        last = offset + len(view) - 1
        answer = self._ask("GET", path, deadline, (("Range", f"bytes={offset}-{last}"),))
        try:
            if answer.status == 416:
                raise ShortObject(f"object {key} has {_size_of(answer)} bytes; byte {offset} was asked for")
            if answer.status != 206:
                raise self._refusal(answer, "read", key)
            begin, end, size = _range_of(answer)
            if begin == offset and end < last:
                raise ShortObject(f"object {key} is short: {last + 1} bytes needed, {size} found")
            if (begin, end) != (offset, last):
                raise Unavailable(f"{self.uri} answered bytes {begin} to {end} of {key}, not {offset} to {last}")
            _read_exactly(answer, view, key)
        finally:
            answer.close()

    def _get_rest(self, path: str, key: str, offset: int, deadline: Deadline) -> bytearray:
        asked = (("Range", f"bytes={offset}-"),) if offset else ()
        answer = self._ask("GET", path, deadline, asked)
        try:
            if answer.status == 416:
                return bytearray(_at_most_the_end(key, offset, _size_of(answer)))
            if answer.status != (206 if offset else 200):
                raise self._refusal(answer, "read", key)
            if offset and _range_of(answer)[0] != offset:
                raise Unavailable(f"{self.uri} answered other bytes of {key} than from {offset} on")
            result = bytearray(_length_of(answer))
            _read_exactly(answer, memoryview(result), key)
            return result
        finally:
            answer.close()

    def exists(self, key: str, *, within_s: float | None = None) -> int | None:
        path = _path(key)
        try:
            return self._head(key, path, self._guard.deadline(within_s))
        except MissingObject:
            return None

    def _head(self, key: str, path: str, deadline: Deadline) -> int:
        def request() -> int:
            answer = self._ask("HEAD", path, deadline)
            try:
                if answer.status != 200:
                    raise self._refusal(answer, "look at", key)
                answer.read()
                return _length_of(answer)
            finally:
                answer.close()

        return self._guard.run("head", deadline, request)

    def list(self, prefix: str, *, within_s: float | None = None) -> Iterator[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        if folder:
            check_key(folder)
        after = ""
        while True:
            query = urlencode({"prefix": prefix, "after": after, "limit": PAGE_KEYS})
            page = self._json("list", f"{LIST_PATH}?{query}", self._guard.deadline(within_s))
            for key, nbytes, modified_s, version in page["objects"]:
                yield ObjectInfo(str(key), int(nbytes), float(modified_s), str(version))
            if not page["more"]:
                return
            after = str(page["more"])

    def _json(self, kind: str, path: str, deadline: Deadline) -> dict[str, Any]:
        def request() -> dict[str, Any]:
            answer = self._ask("GET", path, deadline)
            try:
                if answer.status != 200:
                    raise self._refusal(answer, kind, "its objects")
                found = json.loads(answer.read())
                if not isinstance(found, dict) or not {"objects", "more"} <= found.keys():
                    raise ValueError("no page")
                return found
            except ValueError as error:
                raise StoreError(f"{self.uri} gave a list of objects that cannot be read: {error}") from error
            finally:
                answer.close()

        return self._guard.run(kind, deadline, request)

    # --- writing --------------------------------------------------------------------------------------------------

    def put(self, key: str, *parts: Buffer, durable: bool = True, within_s: float | None = None) -> int:
        path = _path(key) + ("" if durable else "?durable=0")
        views = [view for part in parts if len(view := memoryview(part).cast("B"))]
        total = sum(len(view) for view in views)
        headers = (("Content-Length", str(total)), (CRC_HEADER, str(_crc32c(views))))
        deadline = self._guard.deadline(within_s, total)
        self._guard.run("put", deadline, lambda: self._done("PUT", path, key, deadline, headers, views), total)
        return total

    def delete(self, key: str, *, within_s: float | None = None) -> None:
        path, deadline = _path(key), self._guard.deadline(within_s)
        self._guard.run("delete", deadline, lambda: self._done("DELETE", path, key, deadline))

    def _done(
        self,
        method: str,
        path: str,
        key: str,
        deadline: Deadline,
        headers: Sequence[tuple[str, str]] = (),
        views: Sequence[memoryview] = (),
    ) -> None:
        answer = self._ask(method, path, deadline, headers, views)
        try:
            if answer.status != 204:
                raise self._refusal(answer, "write" if method == "PUT" else "delete", key)
            answer.read()
        finally:
            answer.close()

    # --- the store itself -----------------------------------------------------------------------------------------

    def check(self, *, within_s: float | None = None) -> None:
        within_s = CHECK_S if within_s is None else within_s
        key, content = f"{CHECK_PREFIX}{secrets.token_hex(8)}", secrets.token_bytes(64)
        self.put(key, content, within_s=within_s)
        try:
            if self.get(key, within_s=within_s) != content:
                raise StoreRefused(f"{self.uri} gives back other bytes than were written", StoreProblem.OTHER)
            if key not in (info.key for info in self.list(CHECK_PREFIX, within_s=within_s)):
                raise StoreRefused(f"{self.uri} does not list what it has", StoreProblem.OTHER)
        finally:
            self.delete(key, within_s=within_s)

    def close(self) -> None:
        """What is under way is given up."""
        self._guard.close()
        self._transport.close()

    def _ask(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        headers: Sequence[tuple[str, str]] = (),
        views: Sequence[memoryview] = (),
    ) -> Answer:
        token = self._token
        if not token:
            raise StoreRefused(
                f"there is no token for {self.uri}: it is given with a replica's spec, or as {TOKEN_VARIABLE}",
                StoreProblem.WRONG_CREDENTIALS,
            )
        given = [("Authorization", f"Bearer {token}"), *headers]
        return self._transport.request(method, self._base + path, given, views, deadline)

    def _refusal(self, answer: Answer, what: str, key: str) -> LoaderError:
        """What an answer that is none means. Its code is the error's own, where the store could say so."""
        status, code, message = answer.status, "", ""
        try:
            told = json.loads(answer.read(_TOLD_BYTES) or b"{}")["error"]
            code, message = str(told["code"]), str(told["message"])
        except (ValueError, KeyError, TypeError):
            pass
        if status == 404 and (code == MissingObject.code or answer.headers.get(STORE_HEADER)):
            return MissingObject(f"there is no object {key}")
        if status == 401:
            return StoreRefused(
                f"{self.uri} does not take this slot's token: {message}", StoreProblem.WRONG_CREDENTIALS
            )
        if status == 403:
            return StoreRefused(f"this slot may not {what} {key} in {self.uri}: {message}", StoreProblem.NO_PERMISSION)
        if status == 507:
            return error_from_code("out_of_space", message or f"{self.uri} has no space left")
        if status >= 500 or status == 429:
            return Unavailable(f"{self.uri} answered {status} {code}: {message}".rstrip(": "))
        if code.startswith("object_"):
            return error_from_code(code, message)
        return StoreError(f"{self.uri} refused to {what} {key}: {status} {code} {message}".rstrip())


def _path(key: str) -> str:
    return OBJECTS_PATH + quote(check_key(key), safe="/~")


def _at_most_the_end(key: str, offset: int, size: int) -> bytes:
    """Nothing, which is all there is there."""
    if offset > size:
        raise ShortObject(f"object {key} has {size} bytes; byte {offset} was asked for")
    return b""


def _crc32c(views: Sequence[memoryview]) -> int:
    crc = 0
    for view in views:
        crc = google_crc32c.extend(crc, np.frombuffer(view, np.uint8))
    return crc


def _length_of(answer: Answer) -> int:
    try:
        return int(answer.headers["Content-Length"])
    except (KeyError, TypeError, ValueError):
        raise Unavailable("the store's answer has no length") from None


def _range_of(answer: Answer) -> tuple[int, int, int]:
    """First and last byte, and the size of the whole."""
    text = answer.headers.get("Content-Range", "")
    try:
        span, _, size = text.removeprefix("bytes ").partition("/")
        begin, _, end = span.partition("-")
        return int(begin), int(end), int(size)
    except ValueError:
        raise Unavailable(f"the store answered with Content-Range {text!r}") from None


def _size_of(answer: Answer) -> int:
    text = answer.headers.get("Content-Range", "")
    try:
        return int(text.removeprefix("bytes */"))
    except ValueError:
        raise Unavailable(f"the store answered 416 with Content-Range {text!r}") from None


def _read_exactly(answer: Answer, view: memoryview, key: str) -> None:
    got = answer.read_into(view)
    if got != len(view):
        raise Unavailable(f"the answer for object {key} ended after {got} of {len(view)} bytes")
    answer.read()  # its end, so that the connection can be used again
