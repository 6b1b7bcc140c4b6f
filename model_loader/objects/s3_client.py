"""boto3's S3 client over our own transport: it resolves credentials and addresses, signs, and parses what comes back.

One call is one request, within a deadline, and its errors are ours. `before-send` is the hook at which boto3 lets
somebody else do the sending. Limits: the first call loads boto3's description of S3 and looks for credentials, which
may ask a machine's metadata service with boto3's own time limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import botocore.session
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from model_loader.errors import LoaderError, StoreError, StoreUnavailable
from model_loader.objects.location import S3Location
from model_loader.objects.resilience import Deadline
from model_loader.objects.s3_errors import from_answer, from_boto, wrong_region
from model_loader.objects.transport import Answer, Transport

DEFAULT_REGION: Final = "us-east-1"
MAX_SENT: Final = 3
"""boto3 follows a bucket to its region: the request, a question for the region, the request there. Where the answer to
the question is a redirect too, it would ask for ever."""


class Body:
    """Several buffers as one body, neither joined nor copied: the transport sends `views` one by one."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = tuple(views)
        self._nbytes = sum(len(view) for view in self.views)
        self._at = 0

    def __len__(self) -> int:
        return self._nbytes

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(offset + (0, self._at, self._nbytes)[whence], 0)
        return self._at

    def read(self, amount: int | None = None) -> bytes:
        end = self._nbytes if amount is None or amount < 0 else min(self._at + amount, self._nbytes)
        found, begin = bytearray(), 0
        for view in self.views:
            found += view[max(self._at - begin, 0) : max(end - begin, 0)]
            begin += len(view)
        self._at = max(self._at, end)
        return bytes(found)


class _Current(threading.local):
    """The request that this thread is making."""

    deadline: Deadline | None = None
    answer: Answer | None = None
    sent: int = 0
    url: str = ""


@dataclass(frozen=True, slots=True)
class Range:
    """What the answer to a ranged read says it holds."""

    begin: int
    end: int
    """The last byte."""
    size: int
    """Of the object."""
    version: str

    @staticmethod
    def parse(named: object, length: object, version: object) -> Range:
        try:
            unit, _, rest = str(named).partition(" ")
            span, _, size = rest.partition("/")
            begin, _, end = span.partition("-")
            if unit != "bytes" or int(end) - int(begin) + 1 != int(str(length)):
                raise ValueError(named)
            return Range(int(begin), int(end), int(size), str(version or ""))
        except ValueError as error:
            raise StoreError(f"the store answered a ranged read without a range ({named!r})") from error


class S3Client:
    def __init__(self, place: S3Location) -> None:
        session = botocore.session.Session()
        try:
            region = place.region or session.get_config_variable("region") or DEFAULT_REGION
            ca_bundle = session.get_config_variable("ca_bundle")
        except BotoCoreError as error:
            # A profile that is not there shows at the first question.
            raise from_boto(error, place) from error
        self.place = dataclasses.replace(place, region=region)
        self._transport = Transport(ca_bundle)
        self._current = _Current()
        # Bodies carry a CRC32C of ours and digests are checked by who reads; hashing them once more for the signature
        # would cost more than sending them.
        self._config = Config(
            signature_version="s3v4",
            user_agent_extra="stoker",
            retries={"total_max_attempts": 1, "mode": "standard"},
            s3={"addressing_style": "path" if place.path_style else "auto", "payload_signing_enabled": False},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._base_url = ""
        """What objects' names follow in their URLs, once boto3 has made one."""
        try:
            self._boto = session.create_client(
                "s3",
                region_name=region,
                endpoint_url=place.endpoint or None,
                config=self._config,
            )
            self._credentials = session.get_credentials()
        except BotoCoreError as error:
            raise from_boto(error, place) from error
        self._boto.meta.events.register("before-send.s3", self._send)

    def call(self, name: str, kind: str, what: str, deadline: Deadline, **arguments: Any) -> dict[str, Any]:
        """One request and its parsed answer; `name` is a method of boto3's client."""
        with self.opened(name, kind, what, deadline, **arguments) as (response, _):
            return response

    @contextlib.contextmanager
    def opened(
        self, name: str, kind: str, what: str, deadline: Deadline, **arguments: Any
    ) -> Iterator[tuple[dict[str, Any], Answer]]:
        """The same with the body still on the wire, to be read while the context lasts."""
        current = self._current
        current.deadline, current.answer, current.sent = deadline, None, 0
        try:
            try:
                response: dict[str, Any] = getattr(self._boto, name)(Bucket=self.place.bucket, **arguments)
            except ClientError as error:
                raise from_answer(error.response, kind, what, self.place) from error
            except (BotoCoreError, RuntimeError) as error:
                raise from_boto(error, self.place) from error
            if current.answer is None:
                raise LoaderError(f"boto3 answered {name} without asking the store")
            yield response, current.answer
        finally:
            answer, current.deadline, current.answer = current.answer, None, None
            if answer is not None:
                answer.close()

    @contextlib.contextmanager
    def ranged(self, name: str, key: str, offset: int, last: int, deadline: Deadline) -> Iterator[tuple[Range, Answer]]:
        """Bytes [offset, last] of an object, on the wire. boto3's way through a request costs ten times the CPU of
        signing it, so that only the first read, and what is not answered as it should be, goes that way."""
        asked = f"bytes={offset}-{last}"
        answer = self._ask_directly(name, asked, deadline)
        if answer is not None:
            try:
                if answer.status == 206:
                    found = answer.headers
                    yield Range.parse(found["Content-Range"], found["Content-Length"], found["ETag"]), answer
                    return
                if answer.status >= 500:
                    raise StoreUnavailable(f"the object store of bucket {self.place.bucket} answered {answer.status}")
            finally:
                answer.close()
        with self.opened("get_object", "get", key, deadline, Key=name, Range=asked) as (response, answer):
            if self._current.sent == 1 and self._current.url.endswith(_quoted(name)):
                self._base_url = self._current.url.removesuffix(_quoted(name))
            yield (
                Range.parse(response.get("ContentRange"), response.get("ContentLength"), response.get("ETag")),
                answer,
            )

    def _ask_directly(self, name: str, asked: str, deadline: Deadline) -> Answer | None:
        """None where boto3 has not yet shown the bucket's address, or there are no credentials."""
        if not self._base_url:
            return None
        try:
            credentials = self._credentials.get_frozen_credentials() if self._credentials is not None else None
        except (BotoCoreError, RuntimeError) as error:
            raise from_boto(error, self.place) from error
        if credentials is None:
            return None
        request = AWSRequest("GET", self._base_url + _quoted(name), headers={"Range": asked})
        request.context["client_config"] = self._config
        S3SigV4Auth(credentials, "s3", self.place.region).add_auth(request)
        return self._transport.request("GET", request.url, request.headers.items(), (), deadline)

    def _send(self, request: Any, **_: Any) -> AWSResponse | None:
        deadline = self._current.deadline
        if deadline is None:
            return None
        self._current.sent += 1
        if self._current.sent > MAX_SENT:
            raise wrong_region(self.place, "")
        body = request.body
        views = body.views if isinstance(body, Body) else (memoryview(body),) if body else ()
        if self._current.answer is not None:
            self._current.answer.close()
        self._current.url = request.url
        answer = self._transport.request(request.method, request.url, request.headers.items(), views, deadline)
        self._current.answer = answer
        return AWSResponse(request.url, answer.status, dict(answer.headers.items()), answer)

    def close(self) -> None:
        self._transport.close()


def _quoted(name: str) -> str:
    """As boto3 writes it in a URL."""
    return quote(name, safe="/~")
