"""Manifests that travel to a slot: whole and verified there, or not there at all."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from function_runtime.agent.manifests import MISSING, Manifests
from function_runtime.errors import SlotError, SpecError
from model_loader.checkpoint_files import own_sources
from model_loader.errors import FormatError, IntegrityError, LoaderError, SourceRefused
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from model_loader.portable import Part, admit, pack
from model_loader.prepared import PreparedFile
from model_loader.recipe import prepare
from model_loader.tokenizer import Tokenizer
from tests.support.checkpoints import make_tiny_llama


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("home")
    return import_model(f"file://{make_tiny_llama(folder / 'tiny')}", folder / "models")


def origin_of(folder: Path, manifest: Manifest) -> Callable[[int], tuple[str, str]]:
    """A store that has the weights, as somebody else keeps it."""
    from model_loader.objects import DirectoryStore

    store = DirectoryStore(folder)
    for number, file in enumerate(manifest.files):
        store.put(f"weights/{number}", Path(file.path).read_bytes())
    return lambda number: (store.uri, f"weights/{number}")


def sent(parts: list[Part], *, cut: int = 0) -> asyncio.StreamReader:
    """What an agent reads of a request with these parts."""
    reader = asyncio.StreamReader()
    body = json.dumps([(part.name, part.nbytes) for part in parts]).encode() + b"\n"
    body += b"".join(part.read() for part in parts)
    reader.feed_data(body[: len(body) - cut])
    reader.feed_eof()
    return reader


async def test_a_manifest_arrives_with_its_tokenizer_and_names_no_file_of_the_sender(
    tmp_path: Path, manifest: Manifest
) -> None:
    slot, parts = Manifests(tmp_path / "slot"), pack(manifest, origin_of(tmp_path / "store", manifest))
    sha256 = hashlib.sha256(parts[0].read()).hexdigest()
    with pytest.raises(SlotError) as missing:
        slot.find(manifest.identity, sha256)
    assert (missing.value.code, missing.value.retry) == (MISSING, False)
    await slot.take(manifest.identity, sent(parts))
    await slot.take(manifest.identity, sent(parts))
    path = slot.find(manifest.identity, sha256)
    assert [each.name for each in (tmp_path / "slot").iterdir()] == [manifest.identity], "something was left aside"
    with pytest.raises(SlotError):
        slot.find(manifest.identity, "ab" * 32)
    await slot.take(manifest.identity, sent(pack(manifest, origin_of(tmp_path / "another", manifest))))
    assert path.exists() and len(list((tmp_path / "slot" / manifest.identity).iterdir())) == 2
    found = Manifest.load(path)
    assert found.identity == manifest.identity and found.nbytes == manifest.nbytes
    assert str(manifest.directory) not in path.read_text() and manifest.files[0].path not in path.read_text()
    said = [
        Tokenizer.load(each).encode("hello", add_special_tokens=False) for each in (path.parent, manifest.directory)
    ]
    assert said[0] == said[1]
    with own_sources(found, tmp_path) as sources:
        assert [source.tier.value for source in sources] == ["store"], "a disk was asked that has nothing of it"
    here, there = tmp_path / "here.form", tmp_path / "there.form"
    prepare(manifest, "float32", here), prepare(found, "float32", there)
    forms = [PreparedFile.open(path, verify=True) for path in (here, there)]
    keys = forms[0].keys()
    assert keys and all(bytes(forms[0].raw(key)) == bytes(forms[1].raw(key)) for key in keys)
    await slot.forget(manifest.identity)
    with pytest.raises(SlotError):
        slot.find(manifest.identity, sha256)


@pytest.mark.parametrize("what", ["cut", "tensor", "tokenizer", "chunks", "another", "path", "name", "nothing"])
async def test_what_is_not_the_manifest_it_should_be_is_refused_and_leaves_nothing(
    tmp_path: Path, manifest: Manifest, what: str
) -> None:
    slot, identity, cut = Manifests(tmp_path / "slot"), manifest.identity, 0
    parts = {part.name: part.read() for part in pack(manifest, origin_of(tmp_path / "store", manifest))}
    document = json.loads(parts["manifest.json"])
    match what:
        case "cut":
            cut = 1
        case "tensor":
            document["tensors"][0]["sha256"] = "00" * 32
        case "tokenizer":
            parts["tokenizer.json"] = parts["tokenizer.json"].replace(b"a", b"b", 1)
        case "chunks":
            name = next(name for name in parts if name.startswith("chunks-"))
            parts[name] = bytes(len(parts[name]))
        case "another":
            identity = "ab" * 32
        case "path":
            document["files"][0]["path"] = "/etc/passwd"
        case "name":
            parts["../manifest.json"] = b"{}"
        case "nothing":
            del parts["tokenizer.json"]
    parts["manifest.json"] = json.dumps(document).encode()
    with pytest.raises((SpecError, IntegrityError, SourceRefused)):
        await slot.take(identity, sent([Part(name, content) for name, content in parts.items()], cut=cut))
    assert not list((tmp_path / "slot").iterdir())


def test_what_cannot_be_had_elsewhere_is_not_packed(manifest: Manifest) -> None:
    def nowhere(number: int) -> tuple[str, str]:
        raise SourceRefused("slots elsewhere cannot reach it")

    with pytest.raises(SourceRefused, match="cannot reach"):
        pack(manifest, nowhere)
    with pytest.raises(FormatError, match="earlier release"):
        from dataclasses import replace

        pack(replace(manifest, contents=()), nowhere)


def test_an_empty_folder_is_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(LoaderError):
        admit(tmp_path, "ab" * 32)
