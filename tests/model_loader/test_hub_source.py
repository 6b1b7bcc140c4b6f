import hashlib
from pathlib import Path

import pytest

from model_loader.errors import IntegrityError, LoaderError, SourceMissing, SourceUnavailable
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
