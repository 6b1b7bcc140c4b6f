"""A copy of fetched files that no longer holds is mended by the store they came from, chunk by chunk, while loading."""

import shutil
from pathlib import Path

import pytest

from model_loader import origin, store_source
from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import IntegrityError, LoaderError
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from model_loader.objects import DirectoryStore, ObjectStore
from model_loader.prepared import PreparedFile
from model_loader.recipe import prepare
from tests.support.checkpoints import make_tiny_llama
from tests.support.counting_store import CountingStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    root = make_tiny_llama(tmp_path / "stored", hidden=128, heads=4, kv_heads=2, layers=2, vocab=8192)
    counting = CountingStore(DirectoryStore(root))
    monkeypatch.setattr(store_source, "open_store", lambda uri: DirectoryStore(root))
    monkeypatch.setattr(origin, "open_store", lambda uri: counting)
    return counting


@pytest.fixture
def manifest(store: CountingStore, tmp_path: Path) -> Manifest:
    return import_model("s3://bucket/m", tmp_path / "models")


def load(manifest: Manifest, path: Path) -> dict[str, bytes]:
    """Every tensor of the form; the file itself also says when its groups landed."""
    prepare(manifest, "float32", path)
    form = PreparedFile.open(path, verify=True)
    return {name: form.tensor(name).tobytes() for name in form.keys()}  # noqa: SIM118


def test_an_intact_copy_asks_no_store(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(uri: str) -> ObjectStore:
        pytest.fail(f"{uri} was opened")

    monkeypatch.setattr(origin, "open_store", unwanted)
    load(manifest, tmp_path / "form")


@pytest.mark.parametrize("damage", ["bit", "zero tail", "cut", "gone"])
def test_what_the_copy_no_longer_gives_comes_from_the_store(
    manifest: Manifest, store: CountingStore, tmp_path: Path, damage: str
) -> None:
    expected = load(manifest, tmp_path / "before")
    path = Path(manifest.files[0].path)
    content = bytearray(path.read_bytes())
    chunks = -(-len(content) // CHUNK_BYTES)
    if damage == "bit":
        content[CHUNK_BYTES + 5] ^= 1
        path.write_bytes(content)
        bad = {1}
    elif damage == "zero tail":
        path.write_bytes(content[:-3000] + bytes(3000))
        bad = {chunks - 1}
    elif damage == "cut":
        path.write_bytes(content[: CHUNK_BYTES + 100])
        bad = set(range(1, chunks))
    else:
        path.unlink()
        bad = set(range(chunks))
    assert load(manifest, tmp_path / "after") == expected
    fetched = {offset // CHUNK_BYTES for _, offset, _ in store.ranges}
    assert fetched >= bad
    if damage in ("bit", "zero tail"):
        assert fetched == bad, "nothing but what was bad"


def test_a_store_that_holds_other_bytes_now_mends_nothing(
    manifest: Manifest, store: CountingStore, tmp_path: Path
) -> None:
    path = Path(manifest.files[0].path)
    content = bytearray(path.read_bytes())
    content[5 + CHUNK_BYTES] ^= 1
    path.write_bytes(content)
    store.inner.put("model.safetensors", bytes(content))
    with pytest.raises(IntegrityError, match=rf"bytes {CHUNK_BYTES} to .* expected is .* import the model again"):
        load(manifest, tmp_path / "form")
    assert not list(tmp_path.glob("*form*"))


def test_without_copy_and_store_the_copy_is_what_is_told(
    manifest: Manifest, store: CountingStore, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "stored")
    Path(manifest.files[0].path).unlink()
    with pytest.raises(LoaderError, match=r"model\.safetensors.*import the model again"):
        load(manifest, tmp_path / "form")
