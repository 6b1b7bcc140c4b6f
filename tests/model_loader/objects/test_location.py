"""Which store a URI names, and what a URI may not say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from model_loader.errors import SourceRefused
from model_loader.objects.location import S3Location, open_store


def test_a_bucket_with_everything_said() -> None:
    uri = "s3://my-bucket/a/b?endpoint=http://127.0.0.1:8333&region=eu-west-1&path_style=1"
    place = S3Location.parse(uri)
    assert place == S3Location("my-bucket", "a/b", "http://127.0.0.1:8333", "eu-west-1", True)
    assert place.uri == uri
    assert S3Location.parse(place.uri) == place


def test_a_bucket_alone() -> None:
    assert S3Location.parse("s3://bucket") == S3Location.parse("s3://bucket/") == S3Location("bucket")
    assert S3Location("bucket").uri == "s3://bucket"


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("s3://", "bucket's name"),
        ("s3://Bucket", "bucket's name"),
        ("s3://key:secret@bucket/x", "no credentials"),
        ("s3://bucket/../x", "plain segments"),
        ("s3://bucket/a//b", "plain segments"),
        ("s3://bucket?endpoint=ftp://x", "endpoint must be"),
        ("s3://bucket?endpoint=https://user@x", "endpoint must be"),
        ("s3://bucket?endpoint=https://x/path", "endpoint must be"),
        ("s3://bucket?regoin=x", "regoin is not known"),
        ("s3://bucket?path_style=yes", "path_style must be 1 or 0"),
        ("s3://bucket?region", "name=value"),
    ],
)
def test_a_uri_that_cannot_be_meant_is_refused_with_the_reason(uri: str, why: str) -> None:
    with pytest.raises(SourceRefused, match=why) as refused:
        open_store(uri)
    assert "secret" not in str(refused.value)


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "model_loader.objects.s3", raising=False)
    monkeypatch.delitem(sys.modules, "model_loader.objects.s3_client", raising=False)
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(SourceRefused, match=r"needs botocore.* pip install 'stoker\[s3\]'"):
        open_store("s3://bucket")


def test_who_uses_a_directory_loads_nothing_of_s3(tmp_path_factory: pytest.TempPathFactory) -> None:
    code = (
        "import sys; from model_loader.objects import open_store\n"
        "open_store(sys.argv[1]).check()\n"
        "print([name for name in ('boto3', 'botocore', 'obstore', 'ssl') if name in sys.modules])"
    )
    folder = tmp_path_factory.mktemp("plain").as_uri()
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
