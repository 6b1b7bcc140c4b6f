"""Which store a URI names.

    file:///FOLDER
    s3://BUCKET[/PREFIX][?endpoint=URL&region=REGION&path_style=1]
    http+stoker://HOST:PORT        the store of a control plane that keeps its own

Limits: a URI holds no credentials: those come from boto3's own chain (environment, profile, instance).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from model_loader.errors import LoaderError, SourceRefused
from model_loader.objects.directory import DirectoryStore
from model_loader.objects.protocol import check_key

if TYPE_CHECKING:
    from model_loader.objects.protocol import ObjectStore

TOKEN_VARIABLE: Final = "STOKER_STORE_TOKEN"
"""What an `http+stoker://` store is used with."""
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_YES: Final = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, slots=True)
class S3Location:
    bucket: str
    prefix: str = ""
    """Without slashes around it; keys follow it after a slash."""
    endpoint: str = ""
    """Empty: AWS."""
    region: str = ""
    path_style: bool = False
    """`endpoint/bucket/key` instead of `bucket.endpoint/key`."""

    @property
    def uri(self) -> str:
        named = {"endpoint": self.endpoint, "region": self.region, "path_style": "1" if self.path_style else ""}
        query = urlencode({name: value for name, value in named.items() if value}, safe=":/")
        return f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "") + (f"?{query}" if query else "")

    @staticmethod
    def parse(uri: str) -> S3Location:
        parts = urlsplit(uri)

        def refuse(why: str) -> SourceRefused:
            return SourceRefused(
                f"object store {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path} is not usable: {why}"
            )

        if "@" in parts.netloc:
            raise refuse("a URI holds no credentials; give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        if not _BUCKET.fullmatch(parts.netloc):
            raise refuse("the part after s3:// must be a bucket's name")
        prefix = unquote(parts.path).strip("/")
        if prefix:
            try:
                check_key(prefix)
            except LoaderError as error:
                raise refuse(f"the prefix must be plain segments joined by '/' ({error})") from error
        try:
            given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError as error:
            raise refuse("what follows '?' must be name=value joined by '&'") from error
        if unknown := set(given) - {"endpoint", "region", "path_style"}:
            raise refuse(f"{', '.join(sorted(unknown))} is not known; endpoint, region and path_style are")
        endpoint = given.get("endpoint", "").rstrip("/")
        where = urlsplit(endpoint)
        if endpoint and (where.scheme not in ("http", "https") or not where.hostname or where.path or where.username):
            raise refuse("endpoint must be http://HOST[:PORT] or https://HOST[:PORT]")
        path_style = _YES.get(given.get("path_style", "0"))
        if path_style is None:
            raise refuse("path_style must be 1 or 0")
        return S3Location(parts.netloc, prefix, endpoint, given.get("region", ""), path_style)


def open_store(uri: str) -> ObjectStore:
    """The store a URI names. Nothing is asked of an S3 store yet; `check` does that."""
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return DirectoryStore(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        location = S3Location.parse(uri)
        try:
            from model_loader.objects.s3 import S3Store
        except ModuleNotFoundError as error:
            raise SourceRefused(
                f"object store {location.uri} needs {error.name}: pip install 'stoker[s3]', or give file:///FOLDER"
            ) from error
        return S3Store(location)
    if parts.scheme == "http+stoker":
        from model_loader.objects.http import HttpStore

        return HttpStore(uri)
    raise SourceRefused(f"object store {uri!r} is not supported: give file:///FOLDER or s3://BUCKET/PREFIX")
