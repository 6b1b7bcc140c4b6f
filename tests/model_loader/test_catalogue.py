"""What is imported, found by name, verified byte by byte, and removed with what was fetched for it alone."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from model_loader import store_source, verification
from model_loader.catalogue import ModelState, find_model, list_models, remove_model
from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import SourceMissing, SourceRefused
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from model_loader.objects import DirectoryStore
from tests.support.checkpoints import make_tiny_llama

Import = Callable[[Path], Manifest]


def test_models_are_listed_once_with_all_they_were_imported_from(tiny: Path, tmp_path: Path, imported: Import) -> None:
    models = tmp_path / "models"
    assert list_models(models) == []
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    manifest, other = imported(tiny), imported(make_tiny_llama(tmp_path / "other", seed=1))
    imported(copy)
    listed = {model.identity: model for model in list_models(models)}
    assert set(listed) == {manifest.identity, other.identity}
    known = listed[manifest.identity]
    assert known.uris == tuple(sorted((f"file://{tiny}", f"file://{copy}")))
    assert (known.state, known.problem) == (ModelState.READY, "")
    assert 0 < known.kept_bytes < 1_000_000, "its files are the user's own"


def test_a_model_is_found_by_uri_and_by_first_digits(tiny: Path, tmp_path: Path, imported: Import) -> None:
    manifest = imported(tiny)
    models = tmp_path / "models"
    for name in (f"file://{tiny}", manifest.identity, manifest.identity[:4]):
        assert find_model(models, name).identity == manifest.identity
    for name in ("file:///elsewhere", "0000" if manifest.identity[:4] != "0000" else "1111"):
        with pytest.raises(SourceMissing, match="has been imported"):
            find_model(models, name)
    for name in ("abc", "../x", "", "*" * 8):
        with pytest.raises(SourceRefused, match="names no model"):
            find_model(models, name)
    (models / (manifest.identity[:4] + "0" * 60)).mkdir()
    with pytest.raises(SourceRefused, match="names 2 models"):
        find_model(models, manifest.identity[:4])


def test_a_changed_or_damaged_model_says_what_is_wrong(tiny: Path, tmp_path: Path, imported: Import) -> None:
    manifest = imported(tiny)
    os.utime(tiny / "model.safetensors", ns=(1, 1))
    known = find_model(tmp_path / "models", manifest.identity)
    assert known.state is ModelState.CHANGED and "model.safetensors is gone or was changed" in known.problem
    manifest.path.write_bytes(b"{")
    known = find_model(tmp_path / "models", manifest.identity)
    assert known.state is ModelState.DAMAGED and "import the model again" in known.problem


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """Of two chunks and some, out of a store."""
    root = make_tiny_llama(tmp_path / "stored", hidden=128, heads=4, kv_heads=2, layers=2, vocab=8192)
    monkeypatch.setattr(store_source, "open_store", lambda uri: DirectoryStore(root))
    return import_model("s3://bucket/m", tmp_path / "models")


def test_what_was_fetched_goes_with_the_model_and_what_is_the_users_stays(
    fetched: Manifest, tiny: Path, tmp_path: Path, imported: Import
) -> None:
    own = imported(tiny)
    models = tmp_path / "models"
    kept = find_model(models, fetched.identity).kept_bytes
    assert kept > fetched.nbytes
    removed = remove_model(models, fetched.identity)
    assert (removed.freed_bytes, removed.left) == (kept, ())
    assert not list((models / "sources").rglob("*.safetensors"))
    removed = remove_model(models, own.identity)
    assert removed.left == (str(tiny / "model.safetensors"),)
    assert list_models(models) == [] and not list((models / "imports").glob("*.json"))
    assert imported(tiny).identity == own.identity


def test_files_that_another_model_names_stay(fetched: Manifest, tmp_path: Path) -> None:
    models = tmp_path / "models"
    other = models / ("f" * 64)
    shutil.copytree(fetched.directory, other)
    document = json.loads((other / "manifest.json").read_bytes())
    (other / "manifest.json").write_text(json.dumps({**document, "identity": "f" * 64}))
    remove_model(models, fetched.identity)
    assert all(Path(file.path).exists() for file in fetched.files)
    remove_model(models, "f" * 64)
    assert not any(Path(file.path).exists() for file in fetched.files)


# --- verifying ------------------------------------------------------------------------------------------------------


def found_bad(manifest: Manifest) -> list[verification.BadPart]:
    read: list[int] = []
    bad = list(verification.verify(manifest, read.append))
    assert sum(read) in (0, sum(file.nbytes for file in manifest.files))
    return bad


def test_an_intact_model_is_read_whole_and_found_sound(fetched: Manifest) -> None:
    assert found_bad(fetched) == []


def test_an_altered_byte_is_named_by_file_offset_and_expected_digest(fetched: Manifest) -> None:
    path = Path(fetched.files[0].path)
    content = bytearray(path.read_bytes())
    content[CHUNK_BYTES + 17] ^= 1
    path.write_bytes(content)
    (bad,) = found_bad(fetched)
    assert (bad.file, bad.offset, bad.nbytes) == (str(path), CHUNK_BYTES, CHUNK_BYTES)
    assert bad.expected == fetched.chunk_lists()[0].expected(1).hex() != bad.found
    assert bad.expected in bad.message and str(path) in bad.message


@pytest.mark.parametrize("change", ["cut", "longer", "gone", "zero tail"])
def test_a_file_of_another_length_or_none_is_named(fetched: Manifest, change: str) -> None:
    path = Path(fetched.files[0].path)
    content = path.read_bytes()
    if change == "cut":
        path.write_bytes(content[:-5])
        said = f"has {len(content) - 5} bytes, expected are {len(content)}"
    elif change == "longer":
        path.write_bytes(content + b"x")
        said = f"has {len(content) + 1} bytes"
    elif change == "gone":
        path.unlink()
        said = "cannot be read"
    else:
        path.write_bytes(content[:-5000] + bytes(5000))
        said = "expected is"
    assert said in next(verification.verify(fetched, lambda _: None)).message


def test_texts_beside_the_manifest_are_part_of_what_is_verified(fetched: Manifest) -> None:
    path = fetched.directory / "tokenizer.json"
    intact = path.read_bytes()
    path.write_bytes(intact.replace(b"a", b"b", 1))
    (bad,) = found_bad(fetched)
    assert bad.expected == fetched.identity and "was altered" in bad.message
    path.write_bytes(intact)
    chunks = fetched.chunks_path.read_bytes()
    fetched.chunks_path.write_bytes(chunks[:-1] + b"x")
    (bad,) = found_bad(fetched)
    assert bad.file == str(fetched.chunks_path)


def test_a_manifest_of_version_1_is_verified_by_its_tensors(fetched: Manifest) -> None:
    document = json.loads(fetched.path.read_bytes())
    del document["contents"], document["chunks_sha256"], document["licence"]
    fetched.path.write_text(json.dumps({**document, "version": 1}))
    old = Manifest.load(fetched.path)
    assert list(verification.verify(old, lambda _: None)) == []
    path = Path(old.files[0].path)
    content = bytearray(path.read_bytes())
    content[old.tensors[3].offset] ^= 1
    path.write_bytes(content)
    (bad,) = verification.verify(old, lambda _: None)
    assert old.tensors[3].name in bad.message


def test_the_process_tells_line_by_line(fetched: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(fetched.files[0].path)
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    assert verification.main([str(fetched.path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    bad = [line for line in lines if line["event"] == "bad"]
    assert [(line["identity"], line["file"]) for line in bad] == [(fetched.identity, str(path))]
    assert lines[-1] == {
        "event": "done", "models": 1, "bad_models": 1, "bad_parts": 1,
        "nbytes": sum(file.nbytes for file in fetched.files),
    }  # fmt: skip
    assert lines[-2]["done_bytes"] == lines[-2]["total_bytes"]
