"""Objects in an S3 bucket: ranged reads in parallel straight into the caller's buffer, large objects written in parts.

Every request goes through the store's guard (retries, deadline, breaker), so that one range that fails is asked for
again and not the whole. A read is whole or an error: lengths are compared with what was asked, and the parts of one
read must be of one version. Limits: nothing but digests of the caller's own tells that the bytes themselves are right.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import google_crc32c
import numpy as np

from model_loader.errors import LoaderError, MissingObject, ShortObject, StoreError, StoreProblem, StoreRefused
from model_loader.errors import StoreUnavailable as Unavailable
from model_loader.objects.location import S3Location
from model_loader.objects.parts import FIRST_BYTES, PartSize, cut, together
from model_loader.objects.protocol import CHECK_PREFIX, Buffer, ObjectInfo, check_key
from model_loader.objects.resilience import DEFAULT_LIMITS, Deadline, Guard, Limits
from model_loader.objects.s3_client import Body, Range, S3Client
from model_loader.objects.s3_errors import region_in, wrong_region
from model_loader.objects.stats import StoreStats
from model_loader.objects.transport import Answer

PUT_WHOLE_BYTES: Final = 32 * 1024 * 1024
"""An object longer than this is written in parts."""
PUT_PART_BYTES: Final = 16 * 1024 * 1024
"""At least 5 MiB by the rules of S3, and at most 10,000 parts an object."""
PAGE_KEYS: Final = 1000
THREADS: Final = 8
CHECK_S: Final = 10.0
ABORT_S: Final = 5.0
ABANDONED_AFTER_S: Final = 24 * 3600.0
"""An upload in parts that is this old belongs to a writer that was killed."""


class S3Store:
    """Objects under `s3://BUCKET/PREFIX/`. Connects at the first operation."""

    def __init__(self, place: S3Location, limits: Limits = DEFAULT_LIMITS, *, guard: Guard | None = None) -> None:
        self._place = place
        self.stats = StoreStats()
        self._guard = guard or Guard(self.stats, limits)
        self._lock = threading.Lock()
        self._made: S3Client | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="s3")
        self._part_size = PartSize()
        self._check_key = f"{CHECK_PREFIX}{secrets.token_hex(8)}"
        """Always the same: where deleting is refused, checks leave one object and not one each."""

    @property
    def uri(self) -> str:
        return self._place.uri

    @property
    def _client(self) -> S3Client:
        with self._lock:
            if self._made is None:
                self._made = S3Client(self._place)
            return self._made

    # --- reading --------------------------------------------------------------------------------------------------

    def get(self, key: str, offset: int = 0, length: int | None = None, *, within_s: float | None = None) -> bytes:
        name = self._name(key)
        if offset < 0 or (length is not None and length < 0):
            raise ShortObject(f"object {key} has no byte {min(offset, length or 0)}")
        if length is not None and length > 0:
            result = bytearray(length)
            self.get_into(key, offset, memoryview(result), within_s=within_s)
            return bytes(result)
        deadline = self._guard.deadline(within_s)
        if length is None:
            try:
                return self._get_rest(name, key, offset, deadline)
            except ShortObject:
                pass  # there is no byte at `offset`: allowed at the very end
        size = self._head(name, key, deadline)
        if size is None:
            raise MissingObject(f"there is no object {key}")
        if offset > size:
            raise ShortObject(f"object {key} has {size} bytes; byte {offset} was asked for")
        return b""

    def get_into(self, key: str, offset: int, view: memoryview, *, within_s: float | None = None) -> None:
        view = view.cast("B")
        if not len(view):
            self.get(key, offset, 0, within_s=within_s)
            return
        name = self._name(key)
        if offset < 0:
            raise ShortObject(f"object {key} has no byte {offset}")
        deadline = self._guard.deadline(within_s, len(view))
        self._get_parts(name, key, offset, view, deadline, set())

    def _get_parts(
        self, name: str, key: str, offset: int, view: memoryview, deadline: Deadline, versions: set[str]
    ) -> None:
        size = self._part_size.of(len(view))

        def get(at: int) -> None:
            part = view[at : at + size]
            begin_s = time.monotonic()
            versions.add(
                self._guard.run(
                    "get", deadline, lambda: self._get_range(name, key, offset + at, part, deadline), len(part)
                )
            )
            self._part_size.learn(len(part), time.monotonic() - begin_s)

        together(range(0, len(view), size), get, deadline, self._threads, THREADS)
        if len(versions) > 1:
            raise Unavailable(f"object {key} was replaced while it was read")

    def _get_range(self, name: str, key: str, offset: int, view: memoryview, deadline: Deadline) -> str:
        """Fills `view`; gives the version of the object it is from."""
        last = offset + len(view) - 1
        with self._client.ranged(name, key, offset, last, deadline) as (given, answer):
            if given.begin == offset and given.end < last:
                raise ShortObject(f"object {key} is short: {last + 1} bytes needed, {given.size} found")
            _read_exactly(answer, view, key, given, offset, last)
            return given.version

    def _get_rest(self, name: str, key: str, offset: int, deadline: Deadline) -> bytes:
        """Everything from `offset`: the first part tells how much there is."""
        versions: set[str] = set()

        def first() -> tuple[bytearray, int]:
            with self._client.ranged(name, key, offset, offset + FIRST_BYTES - 1, deadline) as (given, answer):
                result = bytearray(given.size - offset)
                view = memoryview(result)[:FIRST_BYTES]
                _read_exactly(answer, view, key, given, offset, offset + len(view) - 1)
                versions.add(given.version)
                return result, len(view)

        result, found = self._guard.run("get", deadline, first)
        self.stats.add_bytes("get", found)
        if found < len(result):
            rest = memoryview(result)[found:]
            self._get_parts(name, key, offset + found, rest, deadline, versions)
        return bytes(result)

    def exists(self, key: str, *, within_s: float | None = None) -> int | None:
        return self._head(self._name(key), key, self._guard.deadline(within_s))

    def _head(self, name: str, key: str, deadline: Deadline) -> int | None:
        try:
            response = self._ask("head_object", "head", key, deadline, Key=name)
        except MissingObject:
            return None
        return int(response["ContentLength"])

    def list(self, prefix: str, *, within_s: float | None = None) -> Iterator[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        if folder:
            check_key(folder)
        root = f"{self._place.prefix}/" if self._place.prefix else ""
        more: dict[str, Any] = {}
        while True:
            asked = {"Prefix": root + prefix, "MaxKeys": PAGE_KEYS, **more}
            page = self._ask("list_objects_v2", "list", "", self._guard.deadline(within_s), **asked)
            for item in page.get("Contents", ()):
                key = str(item["Key"])[len(root) :]
                if _is_key(key):
                    modified_s = item["LastModified"].timestamp()
                    yield ObjectInfo(key, int(item["Size"]), modified_s, str(item.get("ETag", "")))
            if not page.get("IsTruncated") or not page.get("NextContinuationToken"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    # --- writing --------------------------------------------------------------------------------------------------

    def put(self, key: str, *parts: Buffer, durable: bool = True, within_s: float | None = None) -> int:
        name = self._name(key)
        views = [view for part in parts if len(view := memoryview(part).cast("B"))]
        total = sum(len(view) for view in views)
        deadline = self._guard.deadline(within_s, total)
        if total <= PUT_WHOLE_BYTES:
            self._put("put_object", key, deadline, views, Key=name)
        else:
            self._put_parts(name, key, views, total, deadline)
        return total

    def _put(
        self, method: str, key: str, deadline: Deadline, views: Sequence[memoryview], **arguments: Any
    ) -> dict[str, Any]:
        """One body. Its CRC32C goes with it, so that the store refuses what arrived altered."""
        total, crc = sum(len(view) for view in views), _crc32c(views)

        def request() -> dict[str, Any]:
            body = Body(views)
            return self._client.call(
                method, "put", key, deadline, Body=body, ContentLength=total, ChecksumCRC32C=crc, **arguments
            )

        return {**self._guard.run("put", deadline, request, total), "ChecksumCRC32C": crc}

    def _put_parts(self, name: str, key: str, views: Sequence[memoryview], total: int, deadline: Deadline) -> None:
        token = secrets.token_hex(16)
        upload = self._ask(
            "create_multipart_upload", "put", key, deadline,
            Key=name, ChecksumAlgorithm="CRC32C", Metadata={"stoker-upload": token},
        )["UploadId"]  # fmt: skip
        done: dict[int, dict[str, Any]] = {}
        try:

            def put(numbered: tuple[int, Sequence[memoryview]]) -> None:
                number, part = numbered
                answer = self._put("upload_part", key, deadline, part, Key=name, UploadId=upload, PartNumber=number)
                done[number] = {
                    "PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32C": answer["ChecksumCRC32C"],
                }  # fmt: skip

            together(list(enumerate(cut(views, PUT_PART_BYTES), 1)), put, deadline, self._threads, THREADS)
            whole = {"Parts": [done[number] for number in sorted(done)]}
            self._complete(name, key, upload, whole, token, total, deadline)
        except BaseException:
            self._abort(name, key, upload)
            raise

    def _complete(
        self, name: str, key: str, upload: str, whole: dict[str, Any], token: str, total: int, deadline: Deadline
    ) -> None:
        lost: StoreError | None = None
        try:
            self._ask("complete_multipart_upload", "put", key, deadline,
                      Key=name, UploadId=upload, MultipartUpload=whole)  # fmt: skip
        except (Unavailable, StoreRefused):
            raise
        except StoreError as error:
            lost = error  # perhaps an earlier try did it, and its answer was lost
        try:
            found = self._ask("head_object", "head", key, deadline, Key=name)
        except MissingObject as error:
            raise lost or Unavailable(f"object {key} is not there after it was written") from error
        if lost is not None and found.get("Metadata", {}).get("stoker-upload") != token:
            raise lost
        if int(found["ContentLength"]) != total:
            raise Unavailable(f"object {key} has {found['ContentLength']} bytes after {total} were written")

    def _abort(self, name: str, key: str, upload: str) -> None:
        """Best effort, once: parts that stay are removed by a later `check`."""
        deadline = self._guard.deadline(ABORT_S)
        with contextlib.suppress(LoaderError):
            self._client.call("abort_multipart_upload", "put", key, deadline, Key=name, UploadId=upload)
            self.stats.count("delete")

    def delete(self, key: str, *, within_s: float | None = None) -> None:
        name = self._name(key)
        with contextlib.suppress(MissingObject):
            self._ask("delete_object", "delete", key, self._guard.deadline(within_s), Key=name)

    # --- the store itself -----------------------------------------------------------------------------------------

    def check(self, *, within_s: float | None = None) -> None:
        deadline = self._guard.deadline(CHECK_S if within_s is None else within_s)
        key = self._check_key
        name, content = self._name(key), secrets.token_bytes(64)
        listed = self._ask("list_objects_v2", "list", "", deadline, Prefix=self._name(CHECK_PREFIX[:-1]), MaxKeys=1)
        right = region_in(listed)
        if right and right != self._client.place.region:
            raise wrong_region(self._client.place, right)
        self._put("put_object", key, deadline, [memoryview(content)], Key=name)
        try:
            back = bytearray(len(content))
            self._get_parts(name, key, 0, memoryview(back), deadline, set())
            if back != content:
                raise StoreRefused(f"the object store of bucket {self._place.bucket} gives back other bytes than were "
                                   "written: use another", StoreProblem.OTHER)  # fmt: skip
        finally:
            self._ask("delete_object", "delete", key, deadline, Key=name)
        with contextlib.suppress(LoaderError):
            self._abort_abandoned(deadline)

    def _abort_abandoned(self, deadline: Deadline) -> None:
        found = self._ask("list_multipart_uploads", "list", "", deadline, Prefix=self._place.prefix)
        for item in found.get("Uploads", ()):
            if item["Initiated"].timestamp() < time.time() - ABANDONED_AFTER_S:
                self._abort(item["Key"], item["Key"], item["UploadId"])

    def close(self) -> None:
        """What is under way is given up."""
        self._guard.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._made is not None:
            self._made.close()

    # --- helpers --------------------------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        check_key(key)
        return f"{self._place.prefix}/{key}" if self._place.prefix else key

    def _ask(self, method: str, kind: str, key: str, deadline: Deadline, **arguments: Any) -> dict[str, Any]:
        return self._guard.run(kind, deadline, lambda: self._client.call(method, kind, key, deadline, **arguments))


def _read_exactly(answer: Answer, view: memoryview, key: str, given: Range, begin: int, end: int) -> None:
    if (given.begin, given.end) != (begin, end):
        raise StoreError(f"asked for bytes {begin}-{end} of {key}, the store sends {given.begin}-{given.end}")
    found = answer.read_into(view)
    if found < len(view):
        raise Unavailable(f"the connection ended after {found} of {len(view)} bytes of {key}")


def _crc32c(views: Sequence[memoryview]) -> str:
    crc = 0
    for view in views:
        crc = google_crc32c.extend(crc, np.frombuffer(view, np.uint8))
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except StoreError:
        return False
    return True
