"""Weights that arrive while the model computes: layer by layer, never ahead of what is verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from function_runtime.engine.engine import Engine
from function_runtime.engine.staging import Event, Staging
from function_runtime.errors import LoadError
from function_runtime.native import PULSE_NS, MappedForm, _Pulse
from function_runtime.protocol import EngineOptions
from model_loader.checkpoint_files import checkpoint_chunks, local_source
from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import IntegrityError, LoaderError, SourceUnavailable
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from model_loader.prepared import PreparedFile
from model_loader.progress import Progress
from model_loader.ranges.source import Tier
from model_loader.recipe import prepare
from model_loader.tokenizer import Tokenizer
from tests.function_runtime.engine.support import Driver, make_work, run_one
from tests.support.checkpoints import make_tiny_llama


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Several chunks, the last of them the head's alone."""
    folder = tmp_path_factory.mktemp("arriving")
    source = make_tiny_llama(
        folder / "model", layers=3, hidden=512, heads=8, kv_heads=4, vocab=6000, dtype="bfloat16", seed=5
    )
    return import_model(f"file://{source}", folder / "models")


class Withholding:
    """The checkpoint's own files, but nothing at or beyond `hold_from` before `go`; then it may fail instead."""

    tier = Tier.DISK
    range_bytes = CHUNK_BYTES
    threads = 2
    name = "withholding"

    def __init__(self, manifest: Manifest, folder: Path, hold_from: int) -> None:
        self._local = local_source(manifest, folder)
        self._hold_from = hold_from
        self.go = threading.Event()
        self.error: LoaderError | None = None
        self.reached = threading.Event()

    def size(self, file: str) -> int:
        return self._local.size(file)

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        if offset >= self._hold_from:
            self.reached.set()
            assert self.go.wait(120)
            if self.error is not None:
                raise self.error
        return self._local.read_into(file, offset, view, within_s=within_s)


class Load:
    """A preparation in another thread, its form mapped as soon as it can be."""

    def __init__(self, manifest: Manifest, folder: Path, source: Withholding, dtype: str) -> None:
        self.form: PreparedFile
        self.error: BaseException | None = None
        self._mappable = threading.Event()
        self._manifest, self._out, self._source, self._dtype = manifest, folder / "form", source, dtype
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._mappable.wait(60)

    def _run(self) -> None:
        try:
            prepare(self._manifest, self._dtype, self._out, self._hear, sources=[self._source])
        except BaseException as error:
            self.error = error
        finally:
            self._mappable.set()

    def _hear(self, progress: Progress) -> None:
        if progress.stage == "arriving":
            self.form = PreparedFile.open_arriving(Path(progress.path))
            self._mappable.set()

    def engine(self) -> Engine:
        options = EngineOptions(threads=1, kv_bytes=16 << 20)
        tokenizer = Tokenizer.load(self._manifest.directory)
        return Engine.load(self.form, self._manifest.config, tokenizer, self._manifest.eos_token_ids, options)


def last_chunk(manifest: Manifest) -> int:
    (chunks,) = checkpoint_chunks(manifest).values()
    assert len(chunks) > 3
    return (len(chunks) - 1) * CHUNK_BYTES


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Copied as they are, and made tensor by tensor."""
    return str(request.param)


@pytest.fixture
def source(manifest: Manifest, tmp_path: Path) -> Iterator[Withholding]:
    source = Withholding(manifest, tmp_path, last_chunk(manifest))
    yield source
    source.go.set()


def stepping(engine: Engine) -> tuple[threading.Thread, list[object]]:
    """One prompt through the engine in a thread: what came of it, or what it raised."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(run_one(engine, make_work(range(10, 40), max_tokens=4)))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def wait_for(condition: Callable[[], bool]) -> None:
    nap = threading.Event()
    for _ in range(6000):
        if condition():
            return
        nap.wait(0.01)
    raise AssertionError("it never came")


def test_the_first_layer_is_computed_while_the_last_range_is_withheld(
    manifest: Manifest, tmp_path: Path, source: Withholding, dtype: str
) -> None:
    load = Load(manifest, tmp_path, source, dtype)
    engine = load.engine()
    arrival, board = engine.model.arrival, load.form.board
    assert arrival is not None and board is not None
    thread, outcome = stepping(engine)
    # The model asks for layer 1 when it has layer 0's output; the last byte is still at its source, and stays there.
    wait_for(lambda: 2 in arrival.asked_ns)
    assert source.reached.wait(60)
    assert board.landed_ns(len(load.form.groups) - 1) == 0
    assert not outcome
    source.go.set()
    thread.join(120)
    load.thread.join(120)
    assert load.error is None
    # The trace, in the words of both sides: loader and engine stamp with one clock.
    assert arrival.asked_ns[2] < board.landed_ns(len(load.form.groups) - 1)
    assert engine.model.arrival is None
    (transcript,) = outcome
    complete = Engine.load(
        tmp_path / "form",
        manifest.config,
        Tokenizer.load(manifest.directory),
        manifest.eos_token_ids,
        EngineOptions(threads=1, kv_bytes=16 << 20),
    )
    assert complete.model.arrival is None
    whole = run_one(complete, make_work(range(10, 40), max_tokens=4))
    assert transcript.tokens() == whole.tokens()  # type: ignore[attr-defined]


def test_the_steps_time_is_without_the_wait(
    manifest: Manifest, tmp_path: Path, source: Withholding, dtype: str
) -> None:
    load = Load(manifest, tmp_path, source, dtype)
    engine = load.engine()
    arrival = engine.model.arrival
    assert arrival is not None
    waits = 0

    def waiting() -> None:
        nonlocal waits
        waits += 1
        if waits == 4:
            source.go.set()

    arrival.while_waiting = waiting
    driver = Driver(engine)
    transcript = driver.submit(make_work(range(10, 20), max_tokens=1))
    driver.run()
    assert waits >= 4
    assert transcript.tokens()
    assert arrival.waited_ns == 0


@pytest.mark.parametrize(
    "error", [IntegrityError("bytes 4096 to 8192 are bad"), SourceUnavailable("the store is away")]
)
def test_a_load_that_fails_ends_the_step_with_its_error_and_no_token(
    manifest: Manifest, tmp_path: Path, source: Withholding, dtype: str, error: LoaderError
) -> None:
    load = Load(manifest, tmp_path, source, dtype)
    engine = load.engine()
    thread, outcome = stepping(engine)
    assert source.reached.wait(60)
    source.error = error
    source.go.set()
    thread.join(120)
    load.thread.join(120)
    (raised,) = outcome
    assert type(raised) is type(error)
    assert str(error) in str(raised)
    assert type(load.error) is type(error)
    assert not (tmp_path / "form").exists()


class FakeEvent:
    def __init__(self, device: FakeDevice, upto: int) -> None:
        self._device, self._upto = device, upto

    def synchronize(self) -> None:
        self._device.run(self._upto)


class FakeDevice:
    """Copies happen only when somebody waits for them, so that a slot filled too early shows."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.pinned_bytes = 0
        self._lock = threading.Lock()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, pinned: torch.Tensor) -> None:
        with self._lock:
            self.queue.append((to, pinned))

    def record(self) -> FakeEvent:
        return FakeEvent(self, len(self.queue))

    def hold_up(self, event: Event) -> None:
        event.synchronize()

    def run(self, upto: int) -> None:
        with self._lock:
            while self.done < upto:
                to, pinned = self.queue[self.done]
                to.copy_(pinned)
                self.done += 1


def test_a_ring_of_pinned_memory_brings_every_group_to_a_device_in_order(
    manifest: Manifest, tmp_path: Path, source: Withholding, dtype: str
) -> None:
    load, device = Load(manifest, tmp_path, source, dtype), FakeDevice()
    staging = Staging(load.form, device, slot_bytes=100_000, slots=3)
    staging.wait(1)
    names = [name for name in load.form.keys() if load.form.info(name).group <= 1]  # noqa: SIM118
    for name in names:
        raw = torch.from_numpy(load.form.tensor(name).copy())
        assert torch.equal(staging.tensors[name].view(raw.dtype), raw), name
    source.go.set()
    last = len(load.form.groups) - 1
    staging.wait(last)
    raw = torch.from_numpy(load.form.tensor("lm_head").copy())
    assert torch.equal(staging.tensors["lm_head"].view(raw.dtype), raw)
    assert device.pinned_bytes == 300_000


def test_a_failed_load_reaches_who_waits_for_the_device(
    manifest: Manifest, tmp_path: Path, source: Withholding
) -> None:
    load = Load(manifest, tmp_path, source, "bfloat16")
    staging = Staging(load.form, FakeDevice(), slot_bytes=1 << 20, slots=2)
    source.error = IntegrityError("the last chunk is bad")
    source.go.set()
    with pytest.raises(IntegrityError, match="last chunk"):
        staging.wait(len(load.form.groups) - 1)


def test_a_form_that_went_away_before_it_was_mapped_is_loaded_again_and_no_missing_model(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="it is loaded again") as caught:
        MappedForm.open(tmp_path / "key.prepared", arriving=tmp_path / ".key.prepared.tmp")
    assert caught.value.retry and caught.value.code == "form_gone"


def test_a_long_pass_says_after_each_layer_that_it_goes_on(manifest: Manifest, tmp_path: Path, dtype: str) -> None:
    prepare(manifest, dtype, tmp_path / "form")
    engine = Engine.load(
        tmp_path / "form",
        manifest.config,
        Tokenizer.load(manifest.directory),
        manifest.eos_token_ids,
        EngineOptions(threads=1, kv_bytes=16 << 20),
    )
    layers = 0

    def between() -> None:
        nonlocal layers
        layers += 1

    engine.model.between_layers = between
    run_one(engine, make_work(range(10, 40), max_tokens=1))
    assert layers == manifest.config.num_layers


def test_layers_of_small_steps_are_not_all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, calls = 10 * PULSE_NS, list[int]()
    monkeypatch.setattr("function_runtime.native.time.monotonic_ns", lambda: now_ns)
    pulse = _Pulse(lambda: calls.append(now_ns))
    for _ in range(30):
        now_ns += PULSE_NS // 10
        pulse()
    assert len(calls) == 3
