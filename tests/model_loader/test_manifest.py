"""What a manifest says of a checkpoint's files, and how one of the version before is read."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model_loader import content, recipe
from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import FormatError, IntegrityError, SourceMissing
from model_loader.importer import load_current
from model_loader.licence import licence_of_card, licence_of_wheel
from model_loader.manifest import Manifest
from tests.support.checkpoints import make_tiny_llama
from tests.support.gguf_files import make_tiny_gguf

Import = Callable[[Path], Manifest]


def as_version_1(manifest: Manifest) -> None:
    """The manifest as it was written before there were chunks; the record as well."""
    document = json.loads(manifest.path.read_bytes())
    for name in ("contents", "chunks_sha256", "licence"):
        del document[name]
    manifest.path.write_text(json.dumps({**document, "version": 1}))
    manifest.chunks_path.unlink()
    for path in (manifest.directory.parent / "imports").glob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "version": 1}))


def test_every_files_sha256_and_chunks_are_those_of_its_bytes(tmp_path: Path, imported: Import) -> None:
    root = make_tiny_llama(tmp_path / "wide", hidden=512, heads=8, kv_heads=4, layers=3, vocab=4096)
    manifest = imported(root)
    raw = (root / "model.safetensors").read_bytes()
    assert len(raw) > 3 * CHUNK_BYTES
    (file,), (chunks,) = manifest.contents, manifest.chunk_lists()
    assert (file.nbytes, file.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert (file.origin, file.key) == ("", "")
    for index in range(len(chunks)):
        begin, nbytes = chunks.bounds(index)
        chunks.check(index, raw[begin : begin + nbytes])
    for entry in manifest.tensors:
        piece = raw[entry.offset : entry.offset + entry.nbytes]
        assert hashlib.sha256(piece).hexdigest() == entry.sha256


@pytest.mark.parametrize("piece_bytes", [1, 999, 65536])
def test_tensors_are_digested_as_they_lie_wherever_the_seams_are(
    tiny: Path, imported: Import, piece_bytes: int
) -> None:
    """Two of them left out, so that there are gaps."""
    manifest = imported(tiny)
    raw = (tiny / "model.safetensors").read_bytes()
    waiting = sorted(manifest.tensors, key=lambda entry: entry.offset)[2:-1]
    if piece_bytes == 1:
        waiting = [entry for entry in waiting if entry.nbytes < 1000]
    digests = content._Waiting(Path("m"), waiting)
    for at in range(0, len(raw), piece_bytes):
        digests.feed(at, memoryview(raw)[at : at + piece_bytes])
    found = digests.finish(len(raw))
    assert {name: each.sha256 for name, each in found.items()} == {entry.name: entry.sha256 for entry in waiting}


def test_the_same_tensors_in_other_files_are_the_same_checkpoint(tiny: Path, tmp_path: Path, imported: Import) -> None:
    single = imported(tiny)
    sharded = Path(shutil.copytree(tiny, tmp_path / "sharded"))
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for number in range(3):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, sharded / file)
        places |= dict.fromkeys(names[number::3], file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = imported(sharded)
    assert found.identity == single.identity
    assert [file.nbytes for file in found.contents] == [Path(file.path).stat().st_size for file in found.files]
    assert len(found.chunk_lists()) == 3
    assert single.chunk_lists(), "who read the manifest before the second import still finds its chunks"


def test_lists_of_chunks_that_are_not_the_manifests_are_refused_and_made_again(tiny: Path, imported: Import) -> None:
    manifest = imported(tiny)
    intact = manifest.chunks_path.read_bytes()
    manifest.chunks_path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    with pytest.raises(IntegrityError, match=r"chunks-.* has SHA-256 .* import file:"):
        manifest.chunk_lists()
    assert imported(tiny).chunk_lists()
    assert manifest.chunks_path.read_bytes() == intact
    manifest.chunks_path.unlink()
    with pytest.raises(SourceMissing, match="again"):
        manifest.chunk_lists()
    assert imported(tiny).chunk_lists()


def test_a_manifest_of_version_1_is_read_and_made_again_at_the_first_load(tiny: Path, imported: Import) -> None:
    new = imported(tiny)
    as_version_1(new)
    old = Manifest.load(new.path)
    assert (old.version, old.identity, old.chunk_lists()) == (1, new.identity, ())
    assert load_current(new.path) == new
    assert Manifest.load(new.path) == new
    as_version_1(new)
    assert imported(tiny) == new


def test_a_manifest_of_version_1_whose_source_is_another_model_now_is_refused(tiny: Path, imported: Import) -> None:
    manifest = imported(tiny)
    as_version_1(manifest)
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.float32(1)
    save_file(tensors, tiny / "model.safetensors")
    with pytest.raises(IntegrityError, match="no longer the model"):
        load_current(manifest.path)


def test_a_manifest_of_a_later_version_is_refused(tiny: Path, imported: Import) -> None:
    manifest = imported(tiny)
    manifest.path.write_text(json.dumps({**json.loads(manifest.path.read_bytes()), "version": 3}))
    with pytest.raises(FormatError, match=r"has version 3, known are \(1, 2\)"):
        Manifest.load(manifest.path)


def test_a_file_that_grows_while_it_is_read_is_not_believed(tiny: Path, imported: Import) -> None:
    manifest = imported(tiny)
    with (tiny / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(FormatError, match="belong to no tensor"):
        imported(tiny)
    assert replace(manifest) == manifest


# --- licence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# Model", "apache-2.0"),
        ("---\r\nlicense: 'mit'\r\n---\r\n", "mit"),
        ("---\nlicense: other\nlicense_name: acme-1\n---\n", "acme-1"),
        ("---\nlicense:\n- cc-by-4.0\n- mit\n---\n", "cc-by-4.0"),
        ("---\ntags: [a]\n---\nlicense: mit\n", None),
        ("# Model\nlicense: mit\n", None),
        ("", None),
    ],
)
def test_the_licence_of_a_model_card_is_in_its_front_matter(card: str, licence: str | None) -> None:
    assert licence_of_card(card) == licence


def test_the_licence_is_in_the_manifest_and_not_in_the_identity(
    tiny: Path, tiny_gguf: Path, tmp_path: Path, imported: Import
) -> None:
    silent = imported(tiny)
    assert silent.licence is None
    assert imported(tiny_gguf).licence is None
    spoken = Path(shutil.copytree(tiny, tmp_path / "spoken"))
    (spoken / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert (imported(spoken).licence, imported(spoken).identity) == ("apache-2.0", silent.identity)
    named = make_tiny_gguf(tmp_path / "named.gguf", tiny, licence="llama3")
    assert (imported(named).licence, imported(named).identity) == ("llama3", imported(tiny_gguf).identity)


def test_the_licence_of_a_wheel_is_in_its_metadata() -> None:
    assert licence_of_wheel(b"Name: x\nLicense-Expression: Apache-2.0\n\nbody") == "Apache-2.0"
    assert licence_of_wheel(b"Name: x\nLicense: MIT\n") == "MIT"
    assert licence_of_wheel(b"Classifier: License :: OSI Approved :: BSD License\n") == "BSD License"
    assert licence_of_wheel(b"Name: x\n") is None


def test_preparing_a_checkpoint_of_version_1_imports_it_again(tiny: Path, tmp_path: Path, imported: Import) -> None:
    new = imported(tiny)
    as_version_1(new)
    assert recipe.main([str(new.path), "--out", str(tmp_path / "form")]) == 0
    assert Manifest.load(new.path) == new
    assert (tmp_path / "form").exists()
