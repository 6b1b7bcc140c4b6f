"""Packs looked into without expecting anything: headers tell what an index needs, and no changed byte passes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from function_runtime.errors import KvError
from function_runtime.kv import tool
from function_runtime.kv.inspection import check_pack, scan_pack
from function_runtime.kv.sealing import ChunkSeal
from function_runtime.protocol import KvChunk
from model_loader.errors import LoaderError
from tests.function_runtime.kv.test_chunks import IDENTITY
from tests.function_runtime.kv.test_writing_and_reading import Stored


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    stored = Stored(tmp_path / "objects")
    yield stored
    stored.writer.close()


def written(stored: Stored) -> tuple[KvChunk, ...]:
    for choice, start, end in [(0, 0, 32), (0, 32, 64), (0, 64, 68), (1, 48, 54)]:
        stored.write(choice, start, end)
    return stored.chunks()


def run(command: str, stored: Stored, monkeypatch: pytest.MonkeyPatch, capsys: Any, *packs: str) -> list[Any]:
    monkeypatch.setattr("sys.argv", ["tool", command, "--store", stored.store.root.as_uri()])
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(packs)))
    assert tool.main() == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_headers_alone_give_back_every_record(stored: Stored) -> None:
    chunks = written(stored)
    found = [chunk.record() for chunk in scan_pack(stored.store, chunks[0].pack)]
    for chunk, record in zip(chunks, found, strict=True):
        for name in ("chain", "parent", "start", "end", "offset", "nbytes", "digest", "form"):
            assert record[name] == getattr(chunk, name), name
        assert record["identity"] == IDENTITY.digest.hex() and record["scope"] == "a"
    assert [record["whole"] for record in found] == [True, True, False, False]


def test_every_byte_of_a_pack_that_means_anything_is_checked(stored: Stored) -> None:
    chunks = written(stored)
    path = stored.store.root / chunks[0].pack
    raw = path.read_bytes()
    assert len(check_pack(stored.store, chunks[0].pack)) == len(chunks)
    begin = chunks[0].offset
    inside = [range(c.offset, c.offset + c.nbytes, 131) for c in chunks]
    for index in [*range(0, begin, 17), *(i for places in inside for i in places)]:
        altered = bytearray(raw)
        altered[index] ^= 0x20
        path.write_bytes(altered)
        with pytest.raises((KvError, LoaderError)):
            check_pack(stored.store, chunks[0].pack)


def test_the_tool_tells_bad_packs_from_sound_ones(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = written(stored)[0].pack
    stored.write(0, 0, 16, scope="b")
    bad = stored.chunks()[-1].pack
    path = stored.store.root / bad
    path.write_bytes(path.read_bytes()[:-200])
    lines = run("verify", stored, monkeypatch, capsys, sound, bad, "kv/packs/00/none")
    by_pack = {line["pack"]: line for line in lines if "pack" in line}
    assert by_pack[sound]["event"] == "pack" and by_pack[sound]["chunks"] == 4
    assert by_pack[bad]["event"] == "bad" and by_pack[bad]["reason"]
    assert by_pack["kv/packs/00/none"]["event"] == "bad"
    assert lines[-1]["event"] == "done" and (lines[-1]["checked"], lines[-1]["bad"]) == (1, 2)
    shown = run("inspect", stored, monkeypatch, capsys, sound)[0]
    assert shown["chunks"][0]["made_of"]["dtype"] == "float32" and shown["chunks"][0]["layer_count"] == 3
    assert {line.get("pack") for line in run("scan", stored, monkeypatch, capsys) if line["event"] == "pack"} == {sound}


def test_sealed_packs_are_looked_into_with_their_key_only(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    keys = [bytes([number]) * 32 for number in (1, 2)]
    stored.write(0, 0, 32, seal=ChunkSeal(keys[1]))
    (chunk,) = stored.chunks()
    told = [f"key {key.hex()}" for key in keys]
    for command in ("inspect", "verify", "scan"):
        for given, expected in ((told, "pack"), (told[:1], "bad")):
            lines = run(command, stored, monkeypatch, capsys, *given, chunk.pack)
            assert [line["event"] for line in lines if line["event"] != "progress"] == [expected, "done"], command
    (found,) = scan_pack(stored.store, chunk.pack, [ChunkSeal(key) for key in keys])
    assert found.record()["chain"] == chunk.chain
