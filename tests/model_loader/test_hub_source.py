import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from model_loader.errors import (
    IntegrityError,
    LoaderError,
    OutOfSpace,
    SourceMissing,
    SourceRefused,
    SourceUnavailable,
)
from model_loader.sources import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds the tiny model as org/tiny, as the hub's own client lays it out."""
    constants = pytest.importorskip("huggingface_hub.constants")
    home = tmp_path / "hub"
    repository = home / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for path in tiny.iterdir():
        content = path.read_bytes()
        kind = hashlib.sha256 if path.suffix == ".safetensors" else hashlib.sha1
        blob = repository / "blobs" / kind(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / path.name).symlink_to(blob)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize("uri", ["hf://org/tiny", "hf://org/tiny@main", f"hf://org/tiny@{COMMIT}"])
def test_a_cached_repository_is_used_without_the_hub_and_pinned(cached: Path, tmp_path: Path, uri: str) -> None:
    found = resolve(uri, tmp_path / "sources")
    assert found.root == cached
    assert found.pinned_uri == f"hf://org/tiny@{COMMIT}"


def test_a_cut_blob_is_removed_and_never_used(cached: Path, tmp_path: Path) -> None:
    blob = (cached / "model.safetensors").resolve()
    content = blob.read_bytes()
    blob.write_bytes(content[:-500] + bytes(500))
    with pytest.raises(LoaderError):
        resolve("hf://org/tiny", tmp_path / "sources")
    assert not blob.exists()


def test_an_incomplete_cache_asks_the_hub(cached: Path, tmp_path: Path) -> None:
    (cached / "model.safetensors").unlink()
    with pytest.raises((SourceUnavailable, SourceMissing, IntegrityError)):
        resolve("hf://org/tiny", tmp_path / "sources")


def test_an_unknown_repository_cannot_be_reached_offline(cached: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="could not be reached"):
        resolve("hf://org/other", tmp_path / "sources")


class Listed:
    """A repository as the hub's API tells of it."""

    def __init__(self, **sizes: int) -> None:
        self.siblings = [SimpleNamespace(rfilename=name.replace("_", "."), size=size) for name, size in sizes.items()]

    def model_info(self, *_: object, **__: object) -> "Listed":
        return self


def test_a_repository_of_pickles_is_refused_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "HfApi", lambda: Listed(config_json=100, weights_bin=10**12))
    monkeypatch.setattr(hub, "snapshot_download", refuse_to_fetch)
    with pytest.raises(SourceRefused, match=r"weights\.bin is a pickle.*save_pretrained.* org/pickled "):
        resolve("hf://org/pickled", tmp_path / "sources")


def test_a_repository_that_does_not_fit_the_disk_is_refused_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "HfApi", lambda: Listed(config_json=100, model_safetensors=10**17, weights_bin=1))
    monkeypatch.setattr(hub, "snapshot_download", refuse_to_fetch)
    with pytest.raises(OutOfSpace, match=f"hf://org/large needs {10**17 + 100} bytes of disk"):
        resolve("hf://org/large", tmp_path / "sources")


def refuse_to_fetch(*_: object, local_files_only: bool = False, **__: object) -> str:
    if not local_files_only:
        pytest.fail("fetched")
    raise OSError("not in the cache")
