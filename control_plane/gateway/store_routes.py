"""This installation's own object store over HTTP, for slots that share no folder with it (`model_loader.objects.http`).

    GET, HEAD, PUT, DELETE  /internal/v1/store/objects/KEY      GET  /internal/v1/store/list?prefix=&after=&limit=

Bodies go through a buffer of a megabyte, whatever their size; the disk is read, written and flushed by threads of its
own. A write is answered once it is on disk, and only if its CRC32C is the one that was told. What of it a token opens
is its scope's; `checkpoints/IDENTITY/N` are the files of imported checkpoints, read only and by manifest.
Limits: only a directory is served: who has a bucket asks the bucket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from control_plane.context import CONTEXT, AppContext
from control_plane.errors import Forbidden, InvalidRequest, StokerError, Unauthenticated, Unavailable
from control_plane.gateway.internal import is_internal
from control_plane.store_tokens import CHECKPOINTS, EVERYTHING, StoreScope, is_placeless
from model_loader.errors import LoaderError, MissingObject, OutOfSpace, ShortObject, StoreRefused
from model_loader.objects import DirectoryStore, check_key
from model_loader.objects.directory import ObjectWriter

OBJECTS: Final = "/internal/v1/store/objects/{key:.*}"
LIST: Final = "/internal/v1/store/list"
STORE_HEADER: Final = "x-stoker-store"
CRC_HEADER: Final = "x-stoker-crc32c"
PIECE_BYTES: Final = 1024 * 1024
MOST_LISTED: Final = 1000
THREADS: Final = 8
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StoreServer:
    """`scope_of` says what a request's token opens (and raises); `opened` gives the store, called in a thread;
    `owner_of` says whose a pack is whose name does not."""

    def __init__(
        self,
        opened: Callable[[], DirectoryStore],
        scope_of: Callable[[web.Request], StoreScope],
        checkpoint_file: Callable[[str, int], Path],
        owner_of: Callable[[str], Awaitable[str | None]] | None = None,
    ) -> None:
        self._opened = opened
        self._scope_of = scope_of
        self._checkpoint_file = checkpoint_file
        self._owner_of = owner_of
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(OBJECTS, self._answered(self.read)),
            web.put(OBJECTS, self._answered(self.write)),
            web.delete(OBJECTS, self._answered(self.delete)),
            web.get(LIST, self._answered(self.list)),
        ]

    async def read(self, request: web.Request) -> web.StreamResponse:
        key = check_key(request.match_info["key"])
        scope = self._scope_of(request)
        if not scope.may_read(key) and not await self._owns(scope, key):
            raise Forbidden(f"{scope.whose} does not read {key}")
        path = await self._run(lambda: self._readable(key))
        return web.FileResponse(path, chunk_size=PIECE_BYTES, headers={STORE_HEADER: "1"})

    async def _owns(self, scope: StoreScope, key: str) -> bool:
        if self._owner_of is None or not scope.owners or not is_placeless(key):
            return False
        return await self._owner_of(key) in scope.owners

    def _readable(self, key: str) -> Path:
        if key.startswith(CHECKPOINTS):
            return self._of_checkpoint(key)
        store = self._opened()
        path = store.path_of(key)
        # What is reached by a link that somebody put there is no object of the store.
        if not path.is_file() or not path.resolve().is_relative_to(store.root.resolve()):
            raise MissingObject(f"there is no object {key}")
        return path

    def _of_checkpoint(self, key: str) -> Path:
        identity, _, number = key.removeprefix(CHECKPOINTS).partition("/")
        if not number.isascii() or not number.isdigit():
            raise MissingObject(f"there is no object {key}")
        path = self._checkpoint_file(identity, int(number))
        if not path.is_file():
            raise MissingObject(f"the file of checkpoint {identity[:16]} is gone: import the model again")
        return path

    async def write(self, request: web.Request) -> web.StreamResponse:
        key = check_key(request.match_info["key"])
        scope = self._scope_of(request)
        if not scope.may_write(key):
            raise Forbidden(f"{scope.whose} does not write {key}")
        expected, told_crc = request.content_length, request.headers.get(CRC_HEADER, "")
        if expected is None or not told_crc.isdigit():
            raise InvalidRequest(f"an object is written with Content-Length and {CRC_HEADER}")
        durable = request.query.get("durable", "1") != "0"
        opening = self._in_thread(lambda: self._opened().begin(key, durable=durable))
        try:
            writer = await asyncio.shield(opening)
            nbytes, crc = await self._take(request, writer)
            if nbytes != expected or crc != int(told_crc):
                raise Unavailable(f"object {key} arrived altered: {nbytes} bytes of {expected}", code="body_altered")
            await self._run(writer.commit)
        finally:
            await asyncio.wait({opening})
            if opening.exception() is None:
                await asyncio.shield(self._in_thread(opening.result().abandon))
        return web.Response(status=204, headers={STORE_HEADER: "1"})

    async def _take(self, request: web.Request, writer: ObjectWriter) -> tuple[int, int]:
        """Writes the body down; gives its length and CRC32C."""
        import google_crc32c

        nbytes, crc = 0, 0

        def put_down(pieces: list[bytes], crc: int) -> int:
            writer.write(*pieces)
            for piece in pieces:
                crc = google_crc32c.extend(crc, piece)
            return crc

        async for pieces in _gathered(request):
            nbytes += sum(map(len, pieces))
            crc = await self._run(lambda pieces=pieces, crc=crc: put_down(pieces, crc))  # type: ignore[misc]
        return nbytes, crc

    async def delete(self, request: web.Request) -> web.StreamResponse:
        key = check_key(request.match_info["key"])
        scope = self._scope_of(request)
        if not scope.may_write(key):
            raise Forbidden(f"{scope.whose} does not write {key}")
        await self._run(lambda: self._opened().delete(key))
        return web.Response(status=204, headers={STORE_HEADER: "1"})

    async def list(self, request: web.Request) -> web.StreamResponse:
        prefix, after = request.query.get("prefix", ""), request.query.get("after", "")
        limit = request.query.get("limit", str(MOST_LISTED))
        scope = self._scope_of(request)
        if not scope.may_read(prefix):
            raise Forbidden(f"{scope.whose} does not list {prefix!r}")
        if not limit.isascii() or not limit.isdigit() or not 0 < int(limit) <= MOST_LISTED:
            raise InvalidRequest(f"limit is a number from 1 to {MOST_LISTED}", param="limit")

        def page() -> dict[str, Any]:
            found = list(islice(self._opened().list(prefix, after=after), int(limit) + 1))
            objects = [(info.key, info.nbytes, info.modified_s, info.version) for info in found[: int(limit)]]
            return {"objects": objects, "more": objects[-1][0] if len(found) > int(limit) else None}

        return web.json_response(await self._run(page), headers={STORE_HEADER: "1"})

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _run(self, work: Callable[[], T]) -> T:
        """In a thread, to its end: a client that leaves must not have its file closed under a write."""
        doing = self._in_thread(work)
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            await asyncio.wait({doing})
            raise

    def _answered(self, handler: Handler) -> Handler:
        """With what the store refuses, and what a client's broken body is, as answers."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except StokerError as error:
                return _refused(error.http_status, error.code, error.message)
            except LoaderError as error:
                return _refused(_status_of(error), error.code, str(error))
            except HttpProcessingError as error:
                return _refused(400, "body_altered", f"the body cannot be read: {error.message}")

        return answer


async def _gathered(request: web.Request) -> AsyncIterator[list[bytes]]:
    """The body in pieces that are worth a thread's while."""
    pieces: list[bytes] = []
    nbytes = 0
    async for piece in request.content.iter_any():
        pieces.append(piece)
        nbytes += len(piece)
        if nbytes >= PIECE_BYTES:
            yield pieces
            pieces, nbytes = [], 0
    if pieces:
        yield pieces


def _status_of(error: LoaderError) -> int:
    match error:
        case MissingObject():
            return 404
        case ShortObject():
            return 416
        case OutOfSpace():
            return 507
        case StoreRefused():
            return 422
        case _:
            return 503 if error.code == "object_store_unavailable" else 400


def _refused(status: int, code: str, message: str) -> web.Response:
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    return web.Response(status=status, body=body, content_type="application/json", headers={STORE_HEADER: "1"})


def routes(context: AppContext) -> list[web.RouteDef]:
    def opened() -> DirectoryStore:
        store = context.store.opened()
        if not isinstance(store, DirectoryStore):
            raise StoreRefused(f"this installation's objects are in {store.uri}: ask there")
        return store

    return StoreServer(opened, scope_of, context.slot_files.checkpoint_file, context.kv_index.owner_of).routes()


def scope_of(request: web.Request) -> StoreScope:
    context = request.app[CONTEXT]
    if is_internal(context, request):
        return EVERYTHING
    tokens = context.slot_files.tokens
    claims = tokens.read(request.headers.get("Authorization", "").removeprefix("Bearer "))
    if claims is None:
        raise Unauthenticated("the token of a slot of this installation is required")
    slot_id, tenant = claims.slot_id, claims.tenant
    if tokens.has_run_out(claims):
        raise Unauthenticated(f"the token of {slot_id[:80]} has run out: its agent is sent a newer one", code="expired")
    if not context.fleet.knows(slot_id):
        # Not yet, after a start of ours; or not any more.
        raise Unavailable(f"the slot {slot_id[:80]} is not known here", code="slot_unknown", retry_after_s=1.0)
    if tenant and all(status.spec.tenant != tenant for status in context.fleet.on(slot_id)):
        # Likewise: another gateway may have begun it just now.
        raise Unavailable(
            f"nothing of tenant {tenant[:80]} runs at {slot_id[:80]}", code="tenant_not_there", retry_after_s=1.0
        )
    return claims.scope
