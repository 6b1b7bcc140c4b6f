"""What a hostile or broken checkpoint gets: a refusal that names file and field, before memory is taken."""

import json
import os
import re
import shlex
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from model_loader.directory_checkpoint import describe_directory
from model_loader.errors import FormatError, LoaderError, SourceMissing, SourceRefused, UnsupportedArchitecture
from model_loader.gguf_checkpoint import describe_gguf
from model_loader.gguf_format import read_gguf
from model_loader.gguf_tokenizer import build_tokenizer
from model_loader.pickles import PICKLE_SUFFIXES
from model_loader.safetensors_format import read_file
from model_loader.sources import ModelUri, resolve, resolve_path
from tests.support.checkpoints import make_tiny_llama
from tests.support.gguf_files import make_tiny_gguf
from tests.support.header_fuzz import Fuzz, Outcome, limited_memory


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """The peak of what the interpreter allocates."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def write_header(path: Path, header: object, body: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)


def tensor(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, "data_offsets of tensor b .* overlaps tensor a"),
        ({"a": tensor([2], 0, 8), "b": tensor([1], 12, 16)}, "data_offsets of tensor b .* leaves a hole after"),
        ({"a": tensor([2], 0, 8), "b": tensor([250], 8, 1008)}, "truncated: its tensors need .* last is tensor b"),
        ({"a": tensor([2], 0, 12)}, "tensor 'a' .* needs 8 bytes, its data_offsets give 12"),
        ({"a": tensor([2**62, 2**62], 0, 8)}, "tensor 'a' of shape"),
        ({"a": tensor([-2], 0, 8)}, "tensor 'a' is malformed: shape"),
        ({"a": tensor([2], 8, 0)}, "tensor 'a' is malformed: data_offsets"),
        ({"a": tensor([1] * 100, 0, 4)}, "tensor 'a' is malformed: shape"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "tensor 'a' is malformed: data_offsets is None"),
        ({"a": 3}, "tensor 'a' is malformed: it is 3"),
        ({"a" * 3000: tensor([2], 0, 8)}, "name has 3000 characters"),
        (b'{"a":{"dtype":"F32"},"a":{}}', "holds a name twice: 'a'"),
        (b"[" * 50_000, "nested too deeply"),
        (b"[1, 2]", "no JSON object but \\[1, 2\\]"),
        (b"\xff\xfe", "no JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_header_that_contradicts_itself_is_refused_by_field(tmp_path: Path, header: object, said: str) -> None:
    path = tmp_path / "m.safetensors"
    write_header(path, header, bytes(12))
    with pytest.raises(FormatError, match=said) as refused:
        read_file(path, 0)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3", "BOOL", "f32", "Q4_0"])
def test_an_unknown_dtype_is_refused_by_tensor(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "m.safetensors"
    write_header(path, {"layer.weight": tensor([1], 0, 8, dtype)}, bytes(8))
    with pytest.raises(UnsupportedArchitecture, match=f"dtype of tensor 'layer.weight' is '{dtype}'; read are F32"):
        read_file(path, 0)


@pytest.mark.parametrize("announced", [100_000_000, 100 * 1024 * 1024, 2**63, 2**64 - 1])
def test_a_header_of_a_hundred_megabytes_is_refused_before_it_is_read(tmp_path: Path, announced: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(announced.to_bytes(8, "little"))
    os.truncate(path, 120 * 1024 * 1024)
    with at_most(100_000), pytest.raises(FormatError, match=f"announce a header of {announced} bytes"):
        read_file(path, 0)


@pytest.mark.parametrize("sign", [b"[],", b'"":0,', b"0,", b"{},"], ids=str)
def test_a_header_of_a_great_many_values_is_refused_before_it_is_parsed(tmp_path: Path, sign: bytes) -> None:
    path = tmp_path / "m.safetensors"
    text = b'{"a":[' + sign * (15_000_000 // len(sign)) + b"0]}"
    write_header(path, text)
    with at_most(40_000_000), pytest.raises(FormatError, match="values; at most"):
        read_file(path, 0)


def test_a_configuration_that_announces_absurd_sizes_is_refused_before_they_are_counted(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    for change, said in (
        ({"num_hidden_layers": 2**31 - 1}, "2147483647 layers"),
        ({"head_dim": 2**30}, "head_dim is 1073741824"),
        ({"rope_scaling": [0.5] * 100_000}, "the rotary settings are a list of 100000 items"),
    ):
        (tiny / "config.json").write_text(json.dumps({**config, **change}))
        with at_most(40_000_000), pytest.raises(FormatError, match=said) as refused:
            describe_directory(tiny)
        assert len(str(refused.value)) < 1000


def test_an_index_is_checked_before_its_shards_are(tiny: Path) -> None:
    index = tiny / "model.safetensors.index.json"
    for text, kind, said in (
        ('{"weight_map": {"x": "absent.safetensors"}}', SourceMissing, r"lacks absent\.safetensors, which weight_map"),
        ('{"weight_map": {"x": "../x.safetensors"}}', SourceRefused, "weight_map points at"),
        ('{"weight_map": {"x": "a.bin"}}', SourceRefused, "weight_map points at 'a.bin'"),
        (f'{{"weight_map": {{"x": "{"s" * 50_000}.safetensors"}}}}', SourceRefused, "a file by 50012 characters: 's+…"),
        ('{"weight_map": {"x": 1}}', FormatError, "its weight_map is"),
        ('{"weight_map": {}}', FormatError, "weight_map is empty"),
        ('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}', FormatError, "holds a name twice: 'x'"),
        ("{}", FormatError, "its weight_map is None"),
    ):
        index.write_text(text)
        with pytest.raises(kind, match=said) as refused:
            describe_directory(tiny)
        assert len(str(refused.value)) < 1000
    os.truncate(index, 10**12)
    with at_most(1_000_000), pytest.raises(FormatError, match="has 1000000000000 bytes; at most"):
        describe_directory(tiny)


def test_one_tensor_in_two_shards_is_refused(tiny: Path) -> None:
    names = [entry.name for entry in read_file(tiny / "model.safetensors", 0)]
    (tiny / "other.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    places = {**dict.fromkeys(names, "model.safetensors"), names[-1]: "other.safetensors"}
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(FormatError, match=r"is in .*model\.safetensors and in .*other\.safetensors"):
        describe_directory(tiny)


# --- paths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_link_that_leaves_the_directory_is_refused(tiny: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (tiny / name).rename(outside)
    (tiny / name).symlink_to(outside)
    with pytest.raises(SourceRefused, match=r"a link to .*outside, outside its own folder"):
        describe_directory(tiny)
    outside.unlink()
    with pytest.raises(LoaderError):
        describe_directory(tiny)


def test_links_within_the_directory_and_to_the_hub_caches_blobs_are_followed(tiny: Path, tmp_path: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "v1")
    (tiny / "model.safetensors").symlink_to("v1")
    assert describe_directory(tiny).tensors
    snapshot, blobs = tmp_path / "models--o--r" / "snapshots" / "abc", tmp_path / "models--o--r" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in tiny.iterdir():
        (blobs / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert describe_directory(snapshot).tensors
    (tmp_path / "latest").symlink_to(tiny)
    assert describe_directory(tmp_path / "latest").tensors


def test_a_gguf_file_that_is_a_link_out_of_its_folder_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "m.gguf").symlink_to(tiny_gguf)
    for path in (folder / "m.gguf", folder):
        with pytest.raises(SourceRefused, match="outside its own folder"):
            resolve(f"file://{path}", tmp_path / "sources")


def test_what_is_no_ordinary_file_is_not_opened(tiny: Path) -> None:
    (tiny / "tokenizer.json").unlink()
    os.mkfifo(tiny / "tokenizer.json")
    with pytest.raises(SourceRefused, match=r"tokenizer\.json is no ordinary file"):
        describe_directory(tiny)


# --- pickles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [*PICKLE_SUFFIXES, ".PT"])
def test_a_pickle_is_refused_by_name_with_the_command_that_converts_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(b"\x80\x02}q\x00.")
    refusals: list[Callable[[], object]] = [
        lambda: resolve_path("u", "u", path),
        lambda: ModelUri.parse(f"hf://org/repo/weights{suffix}"),
        lambda: resolve(f"file://{path}", tmp_path / "sources"),
        lambda: resolve(f"file://{tmp_path}", tmp_path / "sources"),
    ]
    for refuse in refusals:
        with pytest.raises(SourceRefused, match=r"is a pickle, which can run code .* python -c '"):
            refuse()


def test_the_command_converts(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "it's weights.pt"
    torch.save({"a": torch.arange(4.0), "b": torch.arange(4.0)[1:]}, path)
    with pytest.raises(SourceRefused) as refused:
        resolve(f"file://{path}", tmp_path)
    said = str(refused.value)
    _, *command = shlex.split(said[said.index("python -c") :])
    subprocess.run([sys.executable, *command], check=True, timeout=120)
    assert {entry.name for entry in read_file(tmp_path / "it's weights.safetensors", 0)} == {"a", "b"}


def test_a_directory_of_pickles_is_told_how_to_convert_the_model(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model-00001-of-00001.bin")
    with pytest.raises(SourceRefused, match=r"pytorch_model-00001-of-00001\.bin is a pickle.*save_pretrained"):
        describe_directory(tiny)


def test_a_pickle_under_another_name_is_known_by_how_it_begins(tiny: Path) -> None:
    for start in (b"PK\x03\x04", b"\x80\x02}q\x00X\x1a\x00\x00\x00"):
        (tiny / "model.safetensors").write_bytes(start + bytes(1000))
        with pytest.raises(SourceRefused, match="begins like a pickle"):
            describe_directory(tiny)


# --- GGUF -------------------------------------------------------------------------------------------------------


def gguf_header(*pairs: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(pairs) if count is None else count) + b"".join(pairs)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gguf_header(tensors=2**62, count=2**62), "are announced, more than its"),
        (gguf_header(tensors=500_000), "500000 tensors and 0 keys are announced; at most"),
        (gguf_header(count=500_000), "500000 keys are announced; at most"),
        (gguf_header(pair(b"k", 9, struct.pack("<IQ", 9, 1))), "metadata 'k': an array of arrays"),
        (gguf_header(pair(b"k", 9, struct.pack("<IQ", 8, 2**61))), "metadata 'k': an array of 2305843009213693952"),
        (gguf_header(pair(b"k", 9, struct.pack("<IQ", 0, 2**24))), "metadata 'k': an array of 16777216 items; a"),
        (gguf_header(pair(b"k", 9, struct.pack("<IQ", 77, 1))), "metadata 'k': an array of unknown item type 77"),
        (gguf_header(pair(b"k", 77, b"")), "metadata 'k': a value of unknown type 77"),
        (gguf_header(pair(b"k", 8, struct.pack("<Q", 2**40))), "metadata 'k': a text of 1099511627776 bytes"),
        (gguf_header(pair(b"k", 8, struct.pack("<Q", 64 << 20))), "metadata 'k': the header would have"),
        (gguf_header(struct.pack("<Q", 2**20)), "metadata key 1 of 1: a text of 1048576 bytes"),
        (gguf_header(pair(b"k", 0, b"a"), pair(b"k", 0, b"b")), "metadata 'k': this key is there twice"),
        (gguf_header(pair(b"general.alignment", 8, text(b"x"))), "general.alignment is 'x'"),
        (gguf_header(pair(b"general.alignment", 4, bytes(4))), "general.alignment is 0"),
        (
            gguf_header(struct.pack("<Q", 300) + bytes(300), tensors=1, count=0),
            "the list of tensors: a text of 300 bytes",
        ),
        (
            gguf_header(text(b"t") + struct.pack("<I", 99), tensors=1, count=0),
            "tensor 't' has 99 dimensions",
        ),
        (
            gguf_header(text(b"t") + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0), tensors=1, count=0),
            "truncated: tensor 't' of shape",
        ),
        (
            gguf_header(text(b"output_norm.weight") + struct.pack("<IQIQ", 1, 4, 0, 1 << 60), tensors=1, count=0),
            "tensor 'output_norm.weight' of shape .* at offset 1152921504606846976",
        ),
        (
            gguf_header(text(b"t") + struct.pack("<IQIQ", 1, 4, 16, 0), tensors=1, count=0),
            "tensor 't' is of GGUF type IQ2_XXS",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_an_absurd_gguf_header_is_refused_by_field_before_memory_is_taken(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    os.truncate(path, 80 * 1024 * 1024)
    with at_most(20_000_000), pytest.raises(LoaderError, match=said) as refused:
        read_gguf(path)
    assert str(path) in str(refused.value)


def test_overlapping_and_repeated_gguf_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def entry(name: bytes, offset: int) -> bytes:
        return text(name) + struct.pack("<IQIQ", 1, 16, 0, offset)

    one, other = b"blk.0.attn_norm.weight", b"blk.1.attn_norm.weight"
    path.write_bytes(gguf_header(entry(one, 0), entry(other, 32), count=0, tensors=2) + bytes(512))
    with pytest.raises(FormatError, match="overlap: the offset"):
        read_gguf(path)
    path.write_bytes(gguf_header(entry(one, 0), entry(one, 64), count=0, tensors=2) + bytes(512))
    with pytest.raises(FormatError, match=r"input_layernorm\.weight twice"):
        read_gguf(path)


def test_a_token_of_absurd_length_is_refused(tiny_gguf: Path) -> None:
    content = tiny_gguf.read_bytes()
    at = content.index(b"<|user|>")
    long = b"x" * 5000
    tiny_gguf.write_bytes(content[: at - 8] + text(long) + content[at + 8 :])
    with pytest.raises(FormatError, match="token 3 is 'xxx"):
        describe_gguf(tiny_gguf)


def test_a_vocabulary_that_would_take_minutes_to_cut_is_refused() -> None:
    with pytest.raises(FormatError, match=r"tokens has 9000000 characters"):
        build_tokenizer({"tokenizer.ggml.tokens": ["x" * 1000] * 9000, "tokenizer.ggml.model": "llama"}, "m.gguf")


# --- fuzz -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("small")
    source = make_tiny_llama(folder / "model", layers=1, hidden=16, heads=2, kv_heads=1, vocab=270)
    return source, make_tiny_gguf(folder / "m.gguf", source)


@pytest.mark.parametrize(("kind", "count"), [("gguf", 2500), ("safetensors", 2000), ("index", 500)])
def test_no_damaged_header_is_anything_but_refused_or_sound(
    kind: str, count: int, tmp_path: Path, small: tuple[Path, Path]
) -> None:
    """Seeded: a finding is had again by `python -m tests.benchmarks.fuzz_headers --only KIND --seed N --count 1`."""
    fuzz, outcome = Fuzz(kind, tmp_path / kind, *small), Outcome()
    with limited_memory():
        fuzz.run(range(count), outcome)
    tracemalloc.start()
    try:
        fuzz.run(range(count, count + 50), outcome, traced=True)
    finally:
        tracemalloc.stop()
    assert outcome.findings == []
    assert outcome.count == count + 50
    assert sum(outcome.refused.values()) > count // 2


def test_the_fuzz_would_notice(tmp_path: Path, small: tuple[Path, Path]) -> None:
    fuzz, outcome = Fuzz("gguf", tmp_path / "x", *small), Outcome()

    def fail() -> None:
        raise IndexError("list index out of range")

    def grab() -> None:
        assert bytearray(400_000_000)

    for careless in (fail, grab):
        fuzz.read = careless
        with limited_memory():
            fuzz.run(range(1), outcome)
    tracemalloc.start()
    try:
        fuzz.run(range(1), outcome, traced=True)
    finally:
        tracemalloc.stop()
    said = [finding.partition(": ")[2] for finding in outcome.findings]
    assert said[0] == "IndexError: list index out of range"
    assert said[1].startswith("MemoryError")
    assert re.fullmatch(r"4000\d{5} bytes of memory", said[2])
