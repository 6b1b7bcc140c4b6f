"""Models imported from an object store: read once, resumed, checked before the bulk, caught when they change."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from model_loader import importer, room, store_source
from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import (
    FormatError,
    LoaderError,
    OutOfSpace,
    SourceMissing,
    SourceRefused,
    SourceUnavailable,
    StoreRefused,
)
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from model_loader.memory_limit import Memory
from model_loader.objects import DirectoryStore, ObjectStore
from model_loader.partial_file import PartialFile, journal_path
from model_loader.progress import Progress
from tests.support.checkpoints import make_tiny_llama
from tests.support.counting_store import CountingStore
from tests.support.faulty_store import FaultyStore

URI = "s3://bucket/models/wide?endpoint=http://127.0.0.1:9"


@pytest.fixture(scope="module")
def wide_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven chunks."""
    folder = tmp_path_factory.mktemp("wide") / "m"
    return make_tiny_llama(folder, hidden=256, heads=4, kv_heads=2, layers=3, vocab=8192)


@pytest.fixture
def wide(wide_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wide_source, tmp_path / "stored"))


@pytest.fixture
def stored(wide: Path, monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    """What `URI` leads to."""
    store = CountingStore(DirectoryStore(wide))
    monkeypatch.setattr(store_source, "open_store", lambda uri: store)
    return store


def weights_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*") if path.is_file())


def test_every_byte_is_moved_once_and_the_identity_is_that_of_the_directory(
    stored: CountingStore, wide: Path, tmp_path: Path
) -> None:
    here = import_model(f"file://{wide}", tmp_path / "elsewhere")
    seen: list[Progress] = []
    manifest = import_model(URI, tmp_path / "models", progress=seen.append)
    assert manifest.identity == here.identity
    assert manifest.contents[0].sha256 == here.contents[0].sha256
    assert (manifest.contents[0].origin, manifest.contents[0].key) == (URI, "model.safetensors")
    assert Path(manifest.files[0].path).is_relative_to(tmp_path / "models" / "sources" / "s3")
    assert stored.nbytes == weights_bytes(wide)
    fetched = [progress for progress in seen if progress.stage == "fetch"]
    assert fetched[-1].done_bytes == fetched[-1].total_bytes == weights_bytes(wide)
    again = import_model(URI, tmp_path / "models")
    assert again == manifest
    assert stored.nbytes == weights_bytes(wide), "asked what is there, and fetched nothing"


def shard(root: Path, count: int = 3) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(root / "model.safetensors")
    (root / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for number in range(count):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names[number::count]}, root / file)
        places |= dict.fromkeys(names[number::count], file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_a_sharded_model_is_fetched_by_its_index_and_nothing_beside_it(
    stored: CountingStore, wide: Path, tmp_path: Path
) -> None:
    single = import_model(f"file://{wide}", tmp_path / "elsewhere")
    shard(wide)
    (wide / "consolidated.safetensors").write_bytes(b"another form of the same")
    (wide / "original").mkdir()
    (wide / "original" / "weights.pt").write_bytes(b"a pickle")
    manifest = import_model(URI, tmp_path / "models")
    assert manifest.identity == single.identity
    assert len(manifest.files) == 3
    assert {key for key, _, _ in stored.ranges if key.endswith(".safetensors")} == {
        f"model-{number}.safetensors" for number in range(3)
    }


def test_a_gguf_object_is_a_model_by_its_own_name_and_alone_under_its_prefix(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "stored"
    folder.mkdir()
    shutil.copy(tiny_gguf, folder / "a.gguf")
    opened: list[str] = []
    monkeypatch.setattr(store_source, "open_store", lambda uri: opened.append(uri) or DirectoryStore(folder))
    found = import_model("s3://bucket/p/a.gguf", tmp_path / "models")
    assert opened == ["s3://bucket/p"]
    assert found.identity == import_model("s3://bucket/p", tmp_path / "models").identity
    assert found.identity == import_model(f"file://{tiny_gguf}", tmp_path / "models").identity
    shutil.copy(tiny_gguf, folder / "b.gguf")
    with pytest.raises(SourceMissing, match="2 GGUF files"):
        import_model("s3://bucket/q", tmp_path / "models")


# --- going on -------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from model_loader import store_source
from model_loader.importer import import_model
from model_loader.objects import DirectoryStore
from tests.support.counting_store import CountingStore
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
store = CountingStore(DirectoryStore(Path(sys.argv[1])), after=int(sys.argv[3]), then=kill)
store_source.open_store = lambda uri: store
store_source._RUN_CHUNKS = 1
import_model(sys.argv[4], Path(sys.argv[2]))
"""


def landed_ranges(models: Path) -> dict[str, set[int]]:
    """Chunks whose bytes and record are there, by file."""
    found: dict[str, set[int]] = {}
    for journal in models.glob("sources/s3/*/*/partial/.*.landed"):
        name = journal.name.removeprefix(".").removesuffix(".landed")
        path = journal.with_name(name)
        with PartialFile(path, path.stat().st_size) as file:
            count = -(-file.nbytes // CHUNK_BYTES)
            found[name] = set(range(count)) - set(file.missing())
    return found


@pytest.mark.parametrize("after", [2, 5, 7, 9])
def test_killed_in_the_middle_only_the_missing_ranges_move(
    stored: CountingStore, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    models = tmp_path / "models"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(wide), str(models), str(after), URI], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not list(models.rglob("manifest.json"))
    before = landed_ranges(models)
    in_flight = store_source._THREADS
    assert sum(map(len, before.values())) >= after - in_flight, "what had been given before was written"
    monkeypatch.setattr(store_source, "_RUN_CHUNKS", 1)
    manifest = import_model(URI, models)
    moved: dict[str, set[int]] = {}
    for key, offset, _ in stored.ranges:
        assert offset // CHUNK_BYTES not in moved.setdefault(key, set()), "moved twice"
        moved[key].add(offset // CHUNK_BYTES)
    for path in (path for path in wide.iterdir() if path.is_file()):
        every = set(range(-(-path.stat().st_size // CHUNK_BYTES)))
        assert moved.get(path.name, set()) == every - before.get(path.name, set()), path.name
    assert manifest.identity == import_model(f"file://{wide}", tmp_path / "elsewhere").identity
    assert not list(models.rglob("*.landed")) and not list(models.rglob("partial"))


def test_a_failed_import_goes_on_where_it_was(stored: CountingStore, wide: Path, tmp_path: Path) -> None:
    faulty = FaultyStore(DirectoryStore(wide))
    stored.inner = faulty  # type: ignore[assignment]
    faulty.fail("503", kinds=("get",), keys="model.safetensors")
    with pytest.raises(SourceUnavailable, match="cannot be read now"):
        import_model(URI, tmp_path / "models")
    faulty.heal()
    import_model(URI, tmp_path / "models")
    assert stored.nbytes == weights_bytes(wide)


def test_a_record_without_its_bytes_is_worth_nothing(tmp_path: Path) -> None:
    """As a power cut leaves it: the journal was written, the data was not; or the journal ends inside a record."""
    path, nbytes = tmp_path / "f", 2 * CHUNK_BYTES + 10
    with PartialFile(path, nbytes) as file:
        for index in (0, 2):
            size = min(CHUNK_BYTES, nbytes - index * CHUNK_BYTES)
            file.land(index, memoryview(bytes([index + 1]) * size))
        assert (file.missing(), file.landed_bytes) == ([1], CHUNK_BYTES + 10)
    with PartialFile(path, nbytes) as file:
        assert file.missing() == [1]
    content = bytearray(path.read_bytes())
    content[0] = 0
    path.write_bytes(content)
    with journal_path(path).open("ab") as journal:
        journal.write(b"half a reco")
    with PartialFile(path, nbytes) as file:
        assert file.missing() == [0, 1]
        assert file.missing(CHUNK_BYTES + 1, CHUNK_BYTES + 2) == [1]
        file.land(0, memoryview(bytes(CHUNK_BYTES)))
    with PartialFile(path, nbytes) as file:
        assert file.missing() == [1]
        with pytest.raises(ValueError, match="lacks 1 chunks"):
            file.complete()


def test_concurrent_imports_of_one_uri_share(stored: CountingStore, wide: Path, tmp_path: Path) -> None:
    found: list[Manifest] = []
    waited: list[Progress] = []
    started = threading.Barrier(3)

    def run() -> None:
        started.wait()
        seen: list[Progress] = []
        found.append(import_model(URI, tmp_path / "models", progress=seen.append))
        waited.extend(progress for progress in seen if progress.stage == "waiting")

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({manifest.identity for manifest in found}) == 1 and len(found) == 3
    assert stored.nbytes == weights_bytes(wide)
    assert waited


# --- what is caught ---------------------------------------------------------------------------------------------


def test_an_object_that_is_written_again_while_it_is_fetched_is_not_believed(
    stored: CountingStore, wide: Path, tmp_path: Path
) -> None:
    def rewrite() -> None:
        path = wide / "model.safetensors"
        content = path.read_bytes()
        stored.inner.put("model.safetensors", content[:-4] + b"abcd")

    stored.after, stored.then = len(list(wide.glob("*.json"))) + 2, rewrite
    with pytest.raises(SourceUnavailable, match="changed while they were fetched: try again"):
        import_model(URI, tmp_path / "models")
    assert not list((tmp_path / "models" / "sources" / "s3").glob("*/*")), "bytes of two objects are not kept"
    assert import_model(URI, tmp_path / "models").identity == import_model(f"file://{wide}", tmp_path / "m").identity


@pytest.mark.parametrize("cut", [1, 1000, 5_000_000])
def test_a_truncated_object_is_refused_by_its_header_before_the_bulk_moves(
    stored: CountingStore, wide: Path, tmp_path: Path, cut: int
) -> None:
    path = wide / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(FormatError, match=r"models/wide\?endpoint=.*: model\.safetensors is truncated"):
        import_model(URI, tmp_path / "models")
    assert sum(nbytes for key, _, nbytes in stored.ranges if key == path.name) <= CHUNK_BYTES
    assert not list((tmp_path / "models" / "sources" / "s3").glob("*/*"))


def test_a_zero_tailed_object_is_refused_and_not_kept(stored: CountingStore, wide: Path, tmp_path: Path) -> None:
    path = wide / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: -len(content) // 3] + bytes(len(content) - len(content[: -len(content) // 3])))
    with pytest.raises(FormatError, match="zero"):
        import_model(URI, tmp_path / "models")
    assert not list((tmp_path / "models" / "sources" / "s3").glob("*/*"))
    path.write_bytes(content)
    assert import_model(URI, tmp_path / "models")


def test_objects_that_are_swapped_are_refused(stored: CountingStore, wide: Path, tmp_path: Path) -> None:
    shard(wide)
    (wide / "model-0.safetensors").rename(wide / "x")
    (wide / "model-1.safetensors").rename(wide / "model-0.safetensors")
    (wide / "x").rename(wide / "model-1.safetensors")
    with pytest.raises(FormatError, match="weight_map says tensor"):
        import_model(URI, tmp_path / "models")


def test_a_store_that_holds_another_model_now_is_imported_again_and_the_old_stays(
    stored: CountingStore, wide: Path, tmp_path: Path
) -> None:
    old = import_model(URI, tmp_path / "models")
    path = wide / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    new = import_model(URI, tmp_path / "models")
    assert new.identity != old.identity
    assert all(file.unchanged() for file in old.files)


def test_a_store_that_cannot_be_asked_leaves_what_was_imported_in_use(
    stored: CountingStore, wide: Path, tmp_path: Path
) -> None:
    manifest = import_model(URI, tmp_path / "models")
    faulty = FaultyStore(DirectoryStore(wide))
    faulty.fail("503", kinds=("list",))
    stored.inner = faulty  # type: ignore[assignment]
    assert import_model(URI, tmp_path / "models") == manifest


@pytest.mark.parametrize("damage", ["cut", "altered", "zero tail", "header", "gone", "settings"])
def test_of_a_kept_copy_that_was_damaged_only_what_is_bad_is_fetched_again(
    stored: CountingStore, wide: Path, tmp_path: Path, damage: str
) -> None:
    manifest = import_model(URI, tmp_path / "models")
    path = Path(manifest.files[0].path)
    content = bytearray(path.read_bytes())
    chunks = -(-len(content) // CHUNK_BYTES)
    bad = {("model.safetensors", chunks - 1)}
    if damage == "cut":
        path.write_bytes(content[:-1000])
    elif damage == "altered":
        content[2 * CHUNK_BYTES + 7] ^= 1
        path.write_bytes(content)
        bad = {("model.safetensors", 2)}
    elif damage == "zero tail":
        path.write_bytes(content[:-5000] + bytes(5000))
    elif damage == "header":
        path.write_bytes(b"\0" * 100 + content[100:])
        bad = {("model.safetensors", 0)}
    elif damage == "settings":
        config = path.parent / "config.json"
        config.write_text(config.read_text().replace("1e-05", "1e-06"))
        bad = {("config.json", 0)}
    else:
        path.unlink()
        bad = {("model.safetensors", index) for index in range(chunks)}
    stored.ranges.clear()
    assert import_model(URI, tmp_path / "models").identity == manifest.identity
    moved = {(key, at // CHUNK_BYTES) for key, offset, nbytes in stored.ranges
             for at in range(offset, offset + nbytes, CHUNK_BYTES)}  # fmt: skip
    assert moved == bad


def test_an_index_that_names_a_missing_object_is_refused_before_the_bulk_moves(
    stored: CountingStore, wide: Path, tmp_path: Path
) -> None:
    shard(wide)
    (wide / "model-2.safetensors").unlink()
    with pytest.raises(SourceMissing, match=r"lacks model-2\.safetensors, which weight_map"):
        import_model(URI, tmp_path / "models")
    assert not any(key.endswith(".safetensors") for key, _, _ in stored.ranges)


def test_a_prefix_of_pickles_or_of_nothing_is_refused(stored: CountingStore, wide: Path, tmp_path: Path) -> None:
    (wide / "model.safetensors").rename(wide / "pytorch_model.bin")
    with pytest.raises(SourceRefused, match=r"pytorch_model\.bin in s3://.* is a pickle.*python -c"):
        import_model(URI, tmp_path / "models")
    (wide / "pytorch_model.bin").unlink()
    with pytest.raises(SourceMissing, match="no safetensors"):
        import_model(URI, tmp_path / "models")
    (wide / "config.json").unlink()
    with pytest.raises(SourceMissing, match=r"no config\.json and 0 GGUF files"):
        import_model(URI, tmp_path / "models")
    assert stored.ranges == []
    with pytest.raises(SourceRefused, match="is a pickle"):
        import_model("s3://bucket/p/model.pt", tmp_path / "models")


def test_what_the_store_refuses_is_said_and_what_landed_stays(
    stored: CountingStore, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Expired(DirectoryStore):
        def get_into(self, key: str, offset: int, view: memoryview, *, within_s: float | None = None) -> None:
            if key == "model.safetensors" and offset:
                raise StoreRefused("the credentials have expired")
            super().get_into(key, offset, view, within_s=within_s)

    stored.inner = Expired(wide)
    with pytest.raises(SourceRefused, match="credentials have expired"):
        import_model(URI, tmp_path / "models")
    stored.inner = DirectoryStore(wide)
    import_model(URI, tmp_path / "models")
    assert stored.nbytes == weights_bytes(wide)


# --- what is needed is asked for before the first byte ------------------------------------------------------------


def test_a_disk_that_is_too_small_is_said_before_the_first_byte_of_weights(
    stored: CountingStore, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = room.SPARE_DISK_BYTES + 8_000_000
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutOfSpace, match=rf"needs \d+ bytes of disk in .* {free} are free") as refused:
        import_model(URI, tmp_path / "models")
    assert refused.value.retry
    assert not any(key.endswith(".safetensors") for key, _, _ in stored.ranges)
    monkeypatch.undo()


def test_memory_that_is_too_small_is_said_before_the_first_byte(
    stored: CountingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "read_memory", lambda: Memory(1 << 40, 1 << 20))
    with pytest.raises(OutOfSpace, match="bytes of memory, 1048576 are available"):
        import_model(URI, tmp_path / "models")
    assert stored.ranges == []


def test_the_importer_takes_only_uris_that_name_a_bucket() -> None:
    for uri in ("s3://", "s3://B", "s3://bucket/a b", "s3://key:secret@bucket/p", "s3://bucket/p?region=x&y=1"):
        with pytest.raises(LoaderError):
            importer.ModelUri.parse(uri)


# --- a real store -------------------------------------------------------------------------------------------------


def test_a_model_comes_out_of_s3_as_it_went_in(
    wide: Path, tmp_path: Path, seaweed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model_loader.objects import open_store
    from tests.support.seaweed import ADMIN, Seaweed

    assert isinstance(seaweed, Seaweed)
    for name, value in ADMIN.environ().items():
        monkeypatch.setenv(name, value)
    uri = seaweed.uri("models/wide")
    upload: ObjectStore = open_store(uri)
    for path in wide.iterdir():
        if path.is_file():
            upload.put(path.name, path.read_bytes())
    command = [sys.executable, "-m", "model_loader.importer", uri, "--models-dir", str(tmp_path / "models")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["identity"] == import_model(f"file://{wide}", tmp_path / "m").identity
    fetched = import_model(uri, tmp_path / "models")
    upload.put("model.safetensors", (wide / "model.safetensors").read_bytes()[:-4] + b"abcd")
    upload.close()
    assert import_model(uri, tmp_path / "models").identity != fetched.identity


FULL = """
import resource, sys
from pathlib import Path
from model_loader import store_source
from model_loader.errors import OutOfSpace
from model_loader.importer import import_model
from model_loader.objects import DirectoryStore
store_source.open_store = lambda uri: DirectoryStore(Path(sys.argv[1]))
store_source.require_disk = lambda *_: None
resource.setrlimit(resource.RLIMIT_FSIZE, (6_000_000, 6_000_000))
try:
    import_model(sys.argv[3], Path(sys.argv[2]))
except OutOfSpace as error:
    assert error.retry
    print(error)
"""


def test_a_disk_that_fills_in_the_middle_is_said_and_what_landed_is_used(
    stored: CountingStore, wide: Path, tmp_path: Path
) -> None:
    shard(wide, 5)
    models = tmp_path / "models"
    command = [sys.executable, "-c", FULL, str(wide), str(models), URI]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no space left while writing" in done.stdout
    assert not list(models.rglob("manifest.json"))
    landed = sum(map(len, landed_ranges(models).values()))
    assert landed
    import_model(URI, models)
    total = sum(-(-path.stat().st_size // CHUNK_BYTES) for path in wide.iterdir() if path.is_file())
    moved = sum(-(-nbytes // CHUNK_BYTES) for _, _, nbytes in stored.ranges)
    assert moved == total - landed
