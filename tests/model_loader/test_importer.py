import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from model_loader import importer, room
from model_loader.description import Description
from model_loader.errors import (
    FormatError,
    IntegrityError,
    LoaderError,
    OutOfSpace,
    SourceMissing,
    SourceRefused,
    SourceUnavailable,
)
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from model_loader.memory_limit import Memory
from model_loader.prepared import PreparedFile
from model_loader.progress import Progress
from model_loader.recipe import prepare
from model_loader.sources import ResolvedModel
from model_loader.tokenizer import Tokenizer
from tests.support.checkpoints import make_tiny_llama

Import = Callable[[Path], Manifest]


def test_an_import_leaves_all_that_serving_needs(tiny: Path, imported: Import) -> None:
    manifest = imported(tiny)
    again = Manifest.load(manifest.path)
    assert again == manifest
    assert manifest.path.parent.name == manifest.identity
    assert {p.name for p in manifest.directory.iterdir()} == {
        "manifest.json", "tokenizer.json", "vocabulary.bin", "config.json", manifest.chunks_path.name,
    }  # fmt: skip
    assert Tokenizer.load(manifest.directory).decode(Tokenizer.load(manifest.directory).encode("hi", False)) == "hi"
    assert manifest.context_length == 8192
    assert manifest.bos_token == "<|begin|>"
    assert manifest.eos_token_ids == (2,)
    assert manifest.add_bos_token


def test_the_same_content_has_the_same_identity_wherever_it_lies(tiny: Path, tmp_path: Path, imported: Import) -> None:
    first = imported(tiny)
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    second = imported(copy)
    assert second.identity == first.identity
    assert second.files[0].path == str(copy / "model.safetensors")
    shutil.rmtree(tiny)
    prepare(second, "float32", tmp_path / "out")


def change_weights(root: Path) -> None:
    path = root / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def change_json(name: str, **values: object) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        document = json.loads((root / name).read_text())
        (root / name).write_text(json.dumps({**document, **values}))

    return change


@pytest.mark.parametrize(
    "change",
    [
        change_weights,
        change_json("config.json", rms_norm_eps=1e-6),
        change_json("config.json", rope_theta=20000.0),
        change_json("tokenizer_config.json", chat_template="{{ messages }}"),
        change_json("generation_config.json", eos_token_id=[2, 3]),
        change_json("tokenizer.json", normalizer={"type": "NFC"}),
    ],
    ids=["weights", "config", "rope", "template", "eos", "tokenizer"],
)
def test_every_part_of_a_model_is_part_of_its_identity(
    tiny: Path, imported: Import, change: Callable[[Path], None]
) -> None:
    before = imported(tiny)
    change(tiny)
    assert imported(tiny).identity != before.identity


def test_an_unchanged_model_is_not_read_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = import_model(f"file://{tiny}", tmp_path / "models")
    monkeypatch.setattr(importer, "_import", lambda *_: pytest.fail("imported again"))
    assert import_model(f"file://{tiny}", tmp_path / "models") == first


@pytest.mark.parametrize("lost", ["manifest.json", "tokenizer.json", "vocabulary.bin"])
def test_what_an_import_wrote_is_written_again_if_it_is_lost(tiny: Path, imported: Import, lost: str) -> None:
    first = imported(tiny)
    (first.directory / lost).unlink()
    assert imported(tiny) == first
    assert (first.directory / lost).exists()


def test_a_damaged_manifest_is_refused_and_replaced(tiny: Path, imported: Import) -> None:
    first = imported(tiny)
    first.path.write_bytes(first.path.read_bytes()[:100])
    with pytest.raises(FormatError, match="import the model again"):
        Manifest.load(first.path)
    assert imported(tiny) == first


def test_zero_tails_are_refused(tiny: Path, tiny_gguf: Path, imported: Import) -> None:
    for path in (tiny / "model.safetensors", tiny_gguf):
        content = path.read_bytes()
        for zeros in (1024, 30_000, len(content) // 3):
            path.write_bytes(content[:-zeros] + bytes(zeros))
            with pytest.raises(FormatError, match="zero"):
                imported(tiny if path.parent == tiny else path)
        path.write_bytes(content)
        imported(tiny if path.parent == tiny else path)


def test_an_embedding_may_end_in_rows_of_zeros(tmp_path: Path, imported: Import) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    root = make_tiny_llama(tmp_path / "padded")
    tensors = load_file(root / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].copy()
        tensors[name][-20:] = np.float32(0)
    save_file(tensors, root / "model.safetensors")
    assert imported(root).identity


def test_files_that_change_under_the_import_are_not_believed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = importer._digest

    def meddle(*arguments: object) -> object:
        result = digest(*arguments)  # type: ignore[arg-type]
        os.utime(tiny / "model.safetensors", ns=(1, 1))
        return result

    monkeypatch.setattr(importer, "_digest", meddle)
    with pytest.raises(SourceUnavailable, match="changed while"):
        import_model(f"file://{tiny}", tmp_path / "models")


def test_texts_that_cannot_be_used_are_refused_at_import(tiny: Path, imported: Import) -> None:
    change_json("tokenizer_config.json", chat_template="{% if %}")(tiny)
    with pytest.raises(LoaderError, match="does not compile"):
        imported(tiny)
    change_json("tokenizer_config.json", chat_template=None)(tiny)
    assert imported(tiny).chat_template is None
    change_json("tokenizer.json", decoder={"type": "WordPiece"})(tiny)
    with pytest.raises(LoaderError, match="WordPiece"):
        imported(tiny)


def test_a_uri_that_is_not_allowed_is_refused_before_anything_is_touched(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceRefused):
        import_model(f"file://{tiny}", tmp_path / "models", allow=("pypi://*",))
    assert not (tmp_path / "models").exists()


def test_a_place_that_cannot_be_written_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LoaderError, match="cannot write"):
        import_model(f"file://{tiny}", tmp_path / "file" / "models")


# --- as a process -----------------------------------------------------------------------------------------------


def command(uri: str, models: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "model_loader.importer", uri, "--models-dir", str(models), *more]


def events(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines()]


def test_the_process_reports_and_imports_neither_torch_nor_numpy(tiny_gguf: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from model_loader.importer import main; status = main(sys.argv[1:]);"
        "sys.exit(status or bool({'torch', 'numpy', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"file://{tiny_gguf}", "--models-dir", str(tmp_path / "m")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *progress, last = events(done.stdout)
    assert last["event"] == "done"
    assert Manifest.load(Path(str(last["manifest_path"]))).identity == last["identity"]
    assert progress[-1]["done_bytes"] == progress[-1]["total_bytes"]


def test_an_error_is_reported_with_code_and_retry(tmp_path: Path) -> None:
    done = subprocess.run(
        command("file:///absent/model.gguf", tmp_path / "m"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == ""
    event = events(done.stdout)[-1]
    assert (event["event"], event["code"], event["retry"]) == ("error", "model_not_found", False)
    refused = subprocess.run(
        command("pypi://x", tmp_path / "m", "--allow", "file://*"), capture_output=True, text=True, check=False
    )
    assert events(refused.stdout)[-1]["code"] == "model_refused"


def test_concurrent_imports_of_one_uri_agree(tiny: Path, tmp_path: Path) -> None:
    running = [
        subprocess.Popen(command(f"file://{tiny}", tmp_path / "m"), stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    outputs = [process.communicate()[0] for process in running]
    lasts = [events(output)[-1] for output in outputs]
    assert len({str(last["manifest_path"]) for last in lasts}) == 1
    read = [output for output in outputs if '"stage": "read"' in output]
    assert len(read) == 1


def test_killed_at_any_point_an_import_can_be_repeated(tmp_path: Path) -> None:
    root = make_tiny_llama(tmp_path / "wide", hidden=512, heads=8, kv_heads=4, layers=3, vocab=4096)
    for after_lines in (0, 1, 2):
        models = tmp_path / f"models-{after_lines}"
        process = subprocess.Popen(command(f"file://{root}", models), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(after_lines):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for path in models.glob("*/manifest.json"):
            Manifest.load(path)
        seen: list[Progress] = []
        manifest = import_model(f"file://{root}", models, progress=seen.append)
        prepare(manifest, "bfloat16", tmp_path / "out")


def test_a_full_disk_is_reported_and_leaves_no_manifest(tiny_gguf: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(f"file://{tiny_gguf}", tmp_path / "m"), capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)),
    )  # fmt: skip
    event = events(done.stdout)[-1]
    assert (event["event"], event["code"], event["retry"]) == ("error", "out_of_space", True)
    assert not list((tmp_path / "m").rglob("manifest.json"))
    assert not list((tmp_path / "m").rglob("*.tmp"))
    assert import_model(f"file://{tiny_gguf}", tmp_path / "m").identity


def test_a_file_swapped_between_header_and_content_is_not_believed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = importer._describe

    def swap(resolved: ResolvedModel) -> Description:
        found = describe(resolved)
        (tiny / "swapped").write_bytes((tiny / "model.safetensors").read_bytes())
        os.replace(tiny / "swapped", tiny / "model.safetensors")
        return found

    monkeypatch.setattr(importer, "_describe", swap)
    with pytest.raises(SourceUnavailable, match="changed while"):
        import_model(f"file://{tiny}", tmp_path / "models")


def test_a_norm_may_end_in_a_zero(tmp_path: Path, imported: Import) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    root = make_tiny_llama(tmp_path / "m")
    tensors = {name: values.copy() for name, values in load_file(root / "model.safetensors").items()}
    tensors["model.norm.weight"][-1] = 0
    tensors["model.layers.0.self_attn.o_proj.weight"][-3:] = np.float32(0)
    save_file(tensors, root / "model.safetensors")
    assert imported(root).identity
    tensors["model.layers.0.self_attn.o_proj.weight"][:] = np.float32(0)
    save_file(tensors, root / "model.safetensors")
    with pytest.raises(FormatError, match="all zero"):
        imported(root)


@pytest.mark.parametrize("gone", ["first", "second", "first is cut"])
def test_a_checkpoint_imported_from_two_places_is_loaded_from_the_one_that_is_left(
    tiny: Path, tmp_path: Path, gone: str
) -> None:
    models = tmp_path / "models"
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    manifest = import_model(f"file://{copy}", models)
    manifest = import_model(f"file://{tiny}", models)
    if gone == "first is cut":
        os.truncate(tiny / "model.safetensors", 5000)
    else:
        shutil.rmtree(tiny if gone == "first" else copy)
    prepare(Manifest.load(manifest.path), "float32", tmp_path / "out")
    PreparedFile.open(tmp_path / "out", verify=True)
    shutil.rmtree(copy if gone != "second" else tiny)
    with pytest.raises((SourceMissing, IntegrityError), match=r"model\.safetensors"):
        prepare(Manifest.load(manifest.path), "float32", tmp_path / "again")


def test_a_chunk_that_rotted_without_a_trace_comes_from_the_other_place_it_was_imported_from(
    tiny: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    import_model(f"file://{copy}", models)
    manifest = import_model(f"file://{tiny}", models)
    prepare(manifest, "float32", tmp_path / "before")
    rot(tiny / "model.safetensors")
    assert all(file.unchanged() for file in manifest.files)
    stats = prepare(manifest, "float32", tmp_path / "out")
    assert stats.bad_chunks == 1
    before, after = (PreparedFile.open(tmp_path / name, verify=True) for name in ("before", "out"))
    assert before.chunks() == after.chunks()
    rot(copy / "model.safetensors")
    with pytest.raises(IntegrityError, match=r"model\.safetensors.* expected"):
        prepare(manifest, "float32", tmp_path / "again")


def test_memory_that_is_too_small_is_said_before_anything_is_read(
    tiny: Path, imported: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "read_memory", lambda: Memory(1 << 40, 1 << 20))
    monkeypatch.setattr(importer, "resolve", lambda *_: pytest.fail("the model was looked for"))
    with pytest.raises(OutOfSpace, match=r"importing file://.* bytes of memory, 1048576 are available"):
        imported(tiny)


def rot(path: Path) -> None:
    """A bit of its last chunk, and nothing that shows from outside."""
    found, content = path.stat(), bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_what_a_killed_import_had_begun_is_removed_by_the_next(tiny: Path, imported: Import) -> None:
    manifest = imported(tiny)
    killed = subprocess.Popen([sys.executable, "-c", "pass"])
    killed.wait()
    left = manifest.directory / f".vocabulary.bin.{killed.pid}.0123abcd.tmp"
    others = manifest.directory / f".vocabulary.bin.{os.getpid()}.0123abcd.tmp"
    for record in (manifest.directory.parent / "imports").glob("*.json"):
        for is_known in (True, False):
            left.touch()
            others.touch()
            if not is_known:
                record.unlink()
            assert imported(tiny).identity == manifest.identity
            assert not left.exists() and others.exists()
