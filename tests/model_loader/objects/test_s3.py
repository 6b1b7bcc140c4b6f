"""S3 on bad days: what a first check tells, what is retried, and that nothing short or late is ever taken."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import botocore.session
import pytest
from botocore.credentials import RefreshableCredentials

from model_loader.errors import (
    MissingObject,
    ShortObject,
    StoreProblem,
    StoreRefused,
    StoreUnavailable,
    problem_of,
)
from model_loader.objects import ObjectStore
from model_loader.objects import s3 as s3_module
from model_loader.objects.parts import PartSize
from model_loader.objects.resilience import DEFAULT_LIMITS
from model_loader.objects.s3_client import S3Client
from tests.support.faulty_proxy import FaultyProxy, error_xml
from tests.support.seaweed import ADMIN, BUCKET, READER, STRANGER, Credentials, Seaweed, boto, free_ports

Opener = Callable[..., ObjectStore]
MIB = 1024 * 1024


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[FaultyProxy]:
    with FaultyProxy(seaweed.port) as proxy:
        yield proxy


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "PartSize", lambda: PartSize(MIB, MIB, MIB))
    monkeypatch.setattr(s3_module, "FIRST_BYTES", MIB)
    monkeypatch.setattr(s3_module, "PUT_WHOLE_BYTES", 5 * MIB)
    monkeypatch.setattr(s3_module, "PUT_PART_BYTES", 5 * MIB)


# --- the first check --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "problem", "said"),
    [
        (Credentials("nobody", "secret"), StoreProblem.WRONG_CREDENTIALS, "access key is not known.*AWS_ACCESS_KEY_ID"),
        (
            Credentials(ADMIN.access_key, "wrong"),
            StoreProblem.WRONG_CREDENTIALS,
            "secret key does not belong.*AWS_SECRET_ACCESS_KEY",
        ),
        (STRANGER, StoreProblem.NO_PERMISSION, "may not list.*grant s3:ListBucket"),
        (READER, StoreProblem.NO_PERMISSION, "may not put.*grant s3:PutObject"),
    ],
    ids=["unknown key", "wrong secret", "no permission", "only reading"],
)
def test_a_check_tells_whose_credentials_do_not_do(
    open_s3: Opener, who: Credentials, problem: StoreProblem, said: str
) -> None:
    with pytest.raises(StoreRefused, match=said) as refused:
        open_s3(who).check()
    assert problem_of(refused.value) is problem
    assert who.secret_key not in str(refused.value)


def test_a_check_tells_of_a_missing_bucket(open_s3: Opener) -> None:
    with pytest.raises(StoreRefused, match=r"there is no bucket not-there.*create it") as refused:
        open_s3(bucket="not-there").check()
    assert problem_of(refused.value) is StoreProblem.MISSING_BUCKET


def test_a_check_tells_of_a_store_that_is_not_there(open_s3: Opener) -> None:
    (port,) = free_ports(1)
    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port} cannot be used: Connection refused") as refused:
        open_s3(endpoint=f"http://127.0.0.1:{port}").check()
    assert problem_of(refused.value) is StoreProblem.UNREACHABLE


def test_a_check_tells_of_missing_credentials(open_s3: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_s3()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreRefused, match=r"no credentials.*set AWS_ACCESS_KEY_ID") as refused:
        store.check()
    assert problem_of(refused.value) is StoreProblem.WRONG_CREDENTIALS


@pytest.mark.parametrize(
    ("status", "body", "problem", "said"),
    [
        (400, error_xml("ExpiredToken", "The provided token has expired."), StoreProblem.EXPIRED_CREDENTIALS, "renew"),
        (403, error_xml("RequestTimeTooSkewed"), StoreProblem.WRONG_CREDENTIALS, "clock"),
        (
            400,
            error_xml("AuthorizationHeaderMalformed", "the region 'us-east-1' is wrong", Region="eu-central-1"),
            StoreProblem.WRONG_REGION,
            "lies in eu-central-1, not in region us-east-1: give region=eu-central-1",
        ),
        (301, error_xml("PermanentRedirect", "other endpoint"), StoreProblem.WRONG_REGION, "give the bucket's region"),
        (507, error_xml("XMinioStorageFull", "minimum free drive threshold"), StoreProblem.FULL, "is full: free some"),
    ],
    ids=["expired", "clock", "region", "redirect", "full"],
)
def test_a_check_tells_what_only_aws_answers(
    open_s3: Opener, proxy: FaultyProxy, status: int, body: str, problem: StoreProblem, said: str
) -> None:
    proxy.set(answer=body, answer_status=status)
    with pytest.raises(StoreRefused, match=said) as refused:
        open_s3(endpoint=proxy.url).check()
    assert problem_of(refused.value) is problem


def test_a_check_tells_of_a_profile_that_is_not_there(open_s3: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_s3()
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    with pytest.raises(StoreRefused, match=r"profile \(nobodys\) could not be found") as refused:
        store.check()
    assert problem_of(refused.value) is StoreProblem.WRONG_CREDENTIALS


def test_a_check_tells_of_credentials_that_cannot_be_renewed(open_s3: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login of hours, whose own source has expired too: boto3 raises what is none of its errors."""
    old = {"access_key": "a", "secret_key": "b", "token": "c", "expiry_time": "2020-01-01T00:00:00Z"}
    expired = RefreshableCredentials.create_from_metadata(old, refresh_using=lambda: old, method="a test")
    monkeypatch.setattr(botocore.session.Session, "get_credentials", lambda session: expired)
    with pytest.raises(StoreRefused, match=r"have expired.*log in again") as refused:
        open_s3().check()
    assert problem_of(refused.value) is StoreProblem.EXPIRED_CREDENTIALS


def test_checks_of_who_may_not_delete_leave_one_object(
    open_s3: Opener, seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = S3Client.call

    def without_deleting(self: S3Client, name: str, *given: Any, **options: Any) -> dict[str, Any]:
        if name == "delete_object":
            raise StoreRefused("may not delete", StoreProblem.NO_PERMISSION)
        return call(self, name, *given, **options)

    monkeypatch.setattr(S3Client, "call", without_deleting)
    store = open_s3(prefix="undeletable")
    for _ in range(3):
        with pytest.raises(StoreRefused, match="may not delete"):
            store.check()
    assert boto(seaweed.endpoint).list_objects_v2(Bucket=BUCKET, Prefix="undeletable/")["KeyCount"] == 1


def test_a_check_removes_uploads_that_a_killed_writer_left(
    open_s3: Opener, seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = boto(seaweed.endpoint)
    client.create_multipart_upload(Bucket=BUCKET, Key="left/x")
    store = open_s3(prefix="left")

    def left() -> int:
        return len(client.list_multipart_uploads(Bucket=BUCKET, Prefix="left").get("Uploads", []))

    store.check()
    assert left() == 1, "it is young: somebody may be writing it"
    monkeypatch.setattr(s3_module, "ABANDONED_AFTER_S", -60.0)
    store.check()
    assert left() == 0


# --- a bad network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["reset", "cut", "unavailable"])
def test_a_fault_now_and_then_is_not_noticed(
    open_s3: Opener, proxy: FaultyProxy, small_parts: None, fault: str
) -> None:
    store = open_s3(endpoint=proxy.url)
    content = os.urandom(8 * MIB)
    proxy.set(seed=1, **{fault: 0.1})
    store.put("x", content)
    store.put("small", b"1")
    assert store.get("x") == content
    assert store.get("small") == b"1"
    counts = proxy.set()
    assert counts[fault] > 0
    use = store.stats.snapshot()
    assert use.retries >= 1 and use.breaker == "closed"


def test_a_range_that_fails_is_asked_for_again_and_not_the_whole(
    open_s3: Opener, proxy: FaultyProxy, small_parts: None
) -> None:
    store = open_s3(endpoint=proxy.url)
    content = os.urandom(20 * MIB)
    store.put("x", content)
    before = store.stats.snapshot()
    proxy.set(seed=3, cut=0.1)
    view = memoryview(bytearray(len(content)))
    store.get_into("x", 0, view)
    assert view == content
    after = store.stats.snapshot()
    retries = after.retries - before.retries
    assert retries >= 1
    assert after.kinds["get"].requests - before.kinds["get"].requests == 20 + retries


def test_a_hung_store_costs_the_deadline_only(open_s3: Opener, proxy: FaultyProxy, small_parts: None) -> None:
    store = open_s3(endpoint=proxy.url)
    store.put("x", bytes(4 * MIB))
    proxy.set(hang=1.0)
    with pytest.raises(StoreUnavailable, match="deadline"):
        store.get_into("x", 0, memoryview(bytearray(4 * MIB)), within_s=0.5)
    with pytest.raises(StoreUnavailable, match="deadline"):
        store.put("x", bytes(6 * MIB), within_s=0.5)


def test_a_store_that_trickles_does_not_outlast_the_deadline_and_writes_nothing_after_it(
    open_s3: Opener, proxy: FaultyProxy, small_parts: None
) -> None:
    """At this pace the whole would take longer than this test may. Nor is it taken for one that is away."""
    store = open_s3(endpoint=proxy.url)
    store.put("x", b"\xff" * (4 * MIB))
    proxy.set(bytes_per_s=20_000)
    view = memoryview(bytearray(4 * MIB))
    for _ in range(DEFAULT_LIMITS.failures_to_open):
        with pytest.raises(StoreUnavailable):
            store.get_into("x", 0, view, within_s=DEFAULT_LIMITS.judged_after_s + 0.1)
    then = bytes(view)
    assert 0 < sum(then) < 0xFF * len(then)
    proxy.set()
    assert store.get("x") == b"\xff" * (4 * MIB)
    assert view == then


def test_a_failing_range_ends_the_others_at_once(open_s3: Opener, proxy: FaultyProxy, small_parts: None) -> None:
    """One range is beyond the end; the others would take longer than this test may."""
    store = open_s3(endpoint=proxy.url)
    store.put("x", bytes(6 * MIB))
    proxy.set(bytes_per_s=20_000)
    with pytest.raises(ShortObject):
        store.get_into("x", 0, memoryview(bytearray(7 * MIB)), within_s=1000)


def test_a_store_that_is_away_opens_the_breaker_and_one_that_is_back_closes_it(
    open_s3: Opener, proxy: FaultyProxy
) -> None:
    store = open_s3(endpoint=proxy.url)
    store.put("x", b"1")
    proxy.set(unavailable=1.0)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            store.get("x")
    asked = proxy.set(unavailable=1.0)["requests"]
    with pytest.raises(StoreUnavailable, match="left alone"):
        store.get("x")
    assert store.stats.snapshot().breaker == "open"
    assert proxy.set()["requests"] == 0, "an open breaker asks nothing"
    assert asked <= 6
    store._guard.breaker._until_s = 0.0  # type: ignore[attr-defined]  # its cool-down is over
    assert store.get("x") == b"1"
    assert store.stats.snapshot().breaker == "closed"


def test_an_object_that_was_not_there_does_not_open_the_breaker(open_s3: Opener) -> None:
    store = open_s3()
    for _ in range(20):
        with pytest.raises(MissingObject):
            store.get("not-there")
    reader = open_s3(READER)
    for _ in range(20):
        with pytest.raises(StoreRefused):
            reader.put("x", b"1")
    assert store.stats.snapshot().breaker == reader.stats.snapshot().breaker == "closed"


def test_a_body_altered_on_its_way_to_the_store_is_not_taken(open_s3: Opener, seaweed: Seaweed) -> None:
    store = open_s3()
    store.put("x", b"what was there")
    right = s3_module._crc32c
    try:
        s3_module._crc32c = lambda views: right([memoryview(b"something else")])
        with pytest.raises(StoreUnavailable, match="BadDigest"):
            store.put("x", b"altered on its way")
    finally:
        s3_module._crc32c = right
    assert store.get("x") == b"what was there"


# --- writing in parts -------------------------------------------------------------------------------------------------


def test_a_failed_upload_in_parts_leaves_nothing(open_s3: Opener, proxy: FaultyProxy, small_parts: None) -> None:
    store = open_s3(endpoint=proxy.url, prefix="aborted")
    store.put("x", b"before")
    put = store._put  # type: ignore[attr-defined]

    def fails_at_the_third(method: str, key: str, *args: object, **named: object) -> object:
        if named.get("PartNumber") == 3:
            raise StoreUnavailable("the third part")
        return put(method, key, *args, **named)

    store._put = fails_at_the_third  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable, match="the third part"):
        store.put("x", os.urandom(16 * MIB))
    assert store.get("x") == b"before"
    client = boto(proxy.url)
    assert client.list_multipart_uploads(Bucket=BUCKET, Prefix="aborted").get("Uploads", []) == []


def test_an_upload_whose_last_answer_was_lost_is_recognised(open_s3: Opener, small_parts: None) -> None:
    store = open_s3()
    client = store._client  # type: ignore[attr-defined]
    call, lost = client.call, []

    def loses(name: str, *args: object, **named: object) -> object:
        answer = call(name, *args, **named)
        if name == "complete_multipart_upload" and not lost:
            lost.append(name)
            raise StoreUnavailable("reset after it was done")
        return answer

    client.call = loses
    content = os.urandom(12 * MIB)
    assert store.put("x", content) == len(content)
    assert lost and store.get("x") == content
