"""A form is had the quickest way there is, is the same whatever the way, and no way's failure is the load's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from model_loader.disk_tier import DiskTier
from model_loader.errors import FormatError, IntegrityError, SourceMissing, SourceRefused, SourceUnavailable
from model_loader.forms import loading
from model_loader.forms.head import FormHead, form_name
from model_loader.forms.kept import DiskForms, StoredForms, head_of
from model_loader.forms.loading import keep_form, load_form
from model_loader.forms.order import FormOrder
from model_loader.forms.origin import Origin, Rates, is_worth_keeping, rank
from model_loader.forms.sweeping import forget_checkpoint
from model_loader.importer import import_model
from model_loader.llama_layout import recipe_name
from model_loader.manifest import Manifest
from model_loader.objects import DirectoryStore
from model_loader.pool import pool_key
from model_loader.prepared import PreparedFile
from model_loader.progress import Progress
from model_loader.ranges.peer import AVOID_S, PeerAddress, Peers, PeerSource
from model_loader.recipe import plan_form, prepare
from tests.model_loader.test_manifest import as_version_1
from tests.support.checkpoints import make_tiny_llama


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    root = tmp_path_factory.mktemp("forms")
    return import_model(f"file://{make_tiny_llama(root / 'tiny', hidden=256, layers=3)}", root / "models")


@pytest.fixture(scope="module")
def form(manifest: Manifest, tmp_path_factory: pytest.TempPathFactory) -> PreparedFile:
    path = tmp_path_factory.mktemp("made") / "f.prepared"
    prepare(manifest, "float32", path)
    return PreparedFile.open(path, verify=True)


class FakeAgent(ThreadingHTTPServer):
    """Serves one form by ranges; `answer` may give (status, body) instead."""

    daemon_threads = True

    def __init__(self, content: bytes, token: str = "secret") -> None:
        self.content, self.token = bytearray(content), token
        self.asked: list[str] = []
        self.answer: Callable[[int, int], tuple[int, bytes] | None] = lambda begin, end: None
        super().__init__(("127.0.0.1", 0), _Handler)
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(f"http://127.0.0.1:{self.server_address[1]}", self.token)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeAgent

    def do_GET(self) -> None:
        span = self.headers["Range"].removeprefix("bytes=")
        self.server.asked.append(span)
        begin, end = (int(part) for part in span.split("-"))
        content = self.server.content
        status, body = 206, bytes(content[begin : end + 1])
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            status, body = 401, b"no"
        elif begin >= len(content):
            status, body = 416, b""
        else:
            status, body = self.server.answer(begin, end) or (status, body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content[begin : end + 1]) if status == 206 else len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{min(end, len(content) - 1)}/{len(content)}")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = status == 206 and len(body) < len(content[begin : end + 1])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def agents(form: PreparedFile) -> Iterator[list[FakeAgent]]:
    made = [FakeAgent(form.path.read_bytes()) for _ in range(2)]
    yield made
    for agent in made:
        agent.shutdown()
        agent.server_close()


@pytest.fixture
def order(manifest: Manifest, tmp_path: Path) -> FormOrder:
    (tmp_path / "pool").mkdir()
    return FormOrder(
        str(manifest.path), "float32", str(tmp_path / "pool" / "f.prepared"),
        pool_key=pool_key(manifest.identity, "float32"),
    )  # fmt: skip


def same(path: str, form: PreparedFile) -> bool:
    found = PreparedFile.open(Path(path), verify=True)
    names = form.keys()
    return found.keys() == names and all(bytes(found.raw(name)) == bytes(form.raw(name)) for name in names)


def fast(order: FormOrder, **rates: float) -> FormOrder:
    """As if these had been measured beside the pool."""
    (Path(order.out).parent / loading.RATES_NAME).write_text(json.dumps({"make": 1e6, "copy as is": 1e6, **rates}))
    return order


# --- from where ------------------------------------------------------------------------------------------------


def test_where_nobody_has_it_it_is_made(order: FormOrder, form: PreparedFile) -> None:
    loaded = load_form(order)
    assert (loaded.kind, loaded.tried) == ("make", ())
    assert same(order.out, form)


def test_another_slot_s_form_is_copied_by_ranges(order: FormOrder, form: PreparedFile, agents: list[FakeAgent]) -> None:
    seen: list[Progress] = []
    loaded = load_form(fast(replace(order, peers=tuple(agent.address for agent in agents))), seen.append)
    assert loaded.kind == "peer" and same(order.out, form)
    assert dict(loaded.stats.by_tier()) == {"peer": form.preamble.body_bytes}
    assert loaded.stats.chunks == len(form.chunks())
    assert [told.stage for told in seen if told.path] == ["arriving"]
    assert sum(len(agent.asked) for agent in agents) > 0


def test_the_disk_tier_and_the_store_give_what_was_kept(order: FormOrder, form: PreparedFile, tmp_path: Path) -> None:
    order = replace(order, disk=str(tmp_path / "disk"), disk_bytes=1 << 30, store=f"file://{tmp_path / 'objects'}")
    load_form(order)
    assert keep_form(fast(order), 1000.0) == {"disk": form.nbytes, "store": keep_bytes(form)}
    assert keep_form(order, 1000.0)["store"] == 0
    for gone, kind in (("", "disk"), ("disk", "store")):
        Path(order.out).unlink()
        asked = replace(order, disk="") if gone else order
        assert load_form(fast(asked, disk=1e12, store=1e11)).kind == kind
        assert same(order.out, form)


def keep_bytes(form: PreparedFile) -> int:
    return form.preamble.body_bytes + len(head_of(form).to_bytes())


def test_what_is_quickly_made_is_not_kept(order: FormOrder, tmp_path: Path) -> None:
    order = replace(order, disk=str(tmp_path / "disk"), disk_bytes=1 << 30, store=f"file://{tmp_path / 'objects'}")
    load_form(order)
    assert keep_form(order, 0.01) == {"disk": 0, "store": 0}


def test_the_quickest_by_what_was_measured_is_taken(order: FormOrder, agents: list[FakeAgent], tmp_path: Path) -> None:
    order = replace(order, peers=(agents[0].address,))
    assert load_form(fast(order, peer=1e3, **{"copy as is": 1e12})).kind == "make"
    assert load_form(fast(order, peer=1e12)).kind == "peer"


# --- what goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["flipped", "cut", "refused", "missing", "broken", "another form", "no head"])
def test_a_peer_that_gives_anything_else_costs_the_way_and_not_the_load(
    order: FormOrder, form: PreparedFile, agents: list[FakeAgent], manifest: Manifest, tmp_path: Path, fault: str
) -> None:
    agent = agents[0]
    body = form.preamble.body_offset
    if fault == "flipped":
        agent.content[body + 5000] ^= 1
    elif fault == "cut":
        agent.answer = lambda begin, end: (
            (206, bytes(agent.content[begin : (begin + end) // 2])) if begin >= body else None
        )
    elif fault == "refused":
        agent.token = "other"
    elif fault == "missing":
        agent.answer = lambda begin, end: (422, b"holds nothing")
    elif fault == "broken":
        agent.answer = lambda begin, end: (500, b"oh") if begin >= body else None
    elif fault == "another form":
        other = import_model(f"file://{make_tiny_llama(tmp_path / 'o', hidden=256, layers=3, seed=9)}", tmp_path / "m")
        prepare(other, "float32", tmp_path / "other.prepared")
        agent.content = bytearray((tmp_path / "other.prepared").read_bytes())
    else:
        agent.content = bytearray(b"nothing like it" * 1000)
    asked = replace(order, peers=(replace(agent.address, token="secret"),))
    loaded = load_form(fast(asked))
    assert loaded.kind == "make" and same(order.out, form)
    (said,) = loaded.tried
    assert said.startswith("peer: ")
    assert [path.name for path in Path(order.out).parent.glob(".*.tmp")] == []


def test_a_bad_chunk_of_one_peer_comes_from_the_other(
    order: FormOrder, form: PreparedFile, agents: list[FakeAgent]
) -> None:
    agents[0].content[form.preamble.body_offset + 100] ^= 1
    loaded = load_form(fast(replace(order, peers=tuple(agent.address for agent in agents))))
    assert loaded.kind == "peer" and same(order.out, form)


def test_a_rotten_chunk_on_disk_comes_from_the_store_and_is_removed(
    order: FormOrder, form: PreparedFile, tmp_path: Path
) -> None:
    order = replace(order, disk=str(tmp_path / "disk"), disk_bytes=1 << 30, store=f"file://{tmp_path / 'objects'}")
    load_form(order)
    keep_form(order, 1000.0)
    chunk = next(Path(order.disk).glob("*/0.chunk"))
    content = bytearray(chunk.read_bytes())
    content[7] ^= 1
    chunk.write_bytes(content)
    loaded = load_form(fast(order, disk=1e12))
    assert loaded.kind == "disk" and loaded.stats.bad_chunks >= 1 and same(order.out, form)
    assert not chunk.exists()


@pytest.mark.parametrize("place", ["peer", "disk", "store", "nowhere"])
def test_a_checkpoint_that_is_not_what_it_was_costs_the_load_only_where_nobody_has_the_form(
    tmp_path: Path, form: PreparedFile, agents: list[FakeAgent], place: str
) -> None:
    source = make_tiny_llama(tmp_path / "tiny", hidden=256, layers=3)
    manifest = import_model(f"file://{source}", tmp_path / "models")
    (tmp_path / "pool").mkdir()
    order = FormOrder(
        str(manifest.path), "float32", str(tmp_path / "pool" / "f.prepared"),
        disk=str(tmp_path / "disk"), disk_bytes=1 << 30, store=f"file://{tmp_path / 'objects'}",
        pool_key=pool_key(manifest.identity, "float32"),
    )  # fmt: skip
    if place in ("disk", "store"):
        load_form(order)
        keep_form(fast(replace(order, **{{"disk": "store", "store": "disk"}[place]: ""})), 1000.0)
        Path(order.out).unlink()
    if place == "peer":
        order = replace(order, peers=(agents[0].address,))
    content = bytearray((source / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (source / "model.safetensors").write_bytes(content)
    fast(order, **{"make": 1e12, "copy as is": 1e12})
    seen: list[Progress] = []
    if place == "nowhere":
        with pytest.raises(IntegrityError, match=r"model\.safetensors .* expected is .* import the model again"):
            load_form(order)
        return
    loaded = load_form(order, seen.append)
    assert loaded.kind == place and same(order.out, form)
    (said,) = loaded.tried
    assert said.startswith("make: ") and "import the model again" in said
    said_of_names = [told.stage for told in seen if told.path or told.stage == "left"]
    assert said_of_names == ["arriving", "left", "arriving"], "who maps it is told of both ways, and of the first's end"


def test_a_head_with_a_changed_byte_is_no_head(form: PreparedFile) -> None:
    raw = head_of(form).to_bytes()
    where = Path("x.head")
    assert FormHead.from_bytes(raw, where) == head_of(form)
    for at in (*range(0, 200, 3), len(raw) // 2, len(raw) - 1):
        changed = bytearray(raw)
        changed[at] ^= 1
        try:
            found = FormHead.from_bytes(bytes(changed), where)
        except (FormatError, IntegrityError):
            continue
        assert found.chunks == head_of(form).chunks and found.table == head_of(form).table
    for cut in (0, 10, 4096, len(raw) - 1):
        with pytest.raises((FormatError, IntegrityError)):
            FormHead.from_bytes(raw[:cut], where)


def test_an_order_is_said_to_a_process_and_its_outcome_told(order: FormOrder, form: PreparedFile) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "model_loader.forms.loading", "pool"],
        input=order.to_bytes(), stdout=subprocess.PIPE, check=True, timeout=60,
    )  # fmt: skip
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["event"], last["origin"], last["bad_chunks"]) == ("done", "make", 0)
    assert same(order.out, form)
    assert FormOrder.parse(order.to_bytes()) == order
    bad = subprocess.run(
        [sys.executable, "-m", "model_loader.forms.loading", "pool"],
        input=b"{}\n", stdout=subprocess.PIPE, timeout=60,
    )  # fmt: skip
    assert bad.returncode == 1 and json.loads(bad.stdout.splitlines()[-1])["code"] == "model_format_invalid"


# --- peers ------------------------------------------------------------------------------------------------------


def test_a_peer_says_what_is_wrong_with_it(agents: list[FakeAgent]) -> None:
    agent = agents[0]
    view = memoryview(bytearray(100))
    with PeerSource(agent.address) as source:
        assert source.size("k") == len(agent.content)
        assert source.read_into("k", 50, view, within_s=5) == 100
        assert bytes(view) == bytes(agent.content[50:150])
        assert source.read_into("k", len(agent.content) - 10, view, within_s=5) == 10
        with pytest.raises(IntegrityError, match="no byte"):
            source.read_into("k", len(agent.content), view, within_s=5)
    with PeerSource(replace(agent.address, token="wrong")) as source, pytest.raises(SourceRefused):
        source.size("k")
    with PeerSource(PeerAddress("http://127.0.0.1:1", "t")) as source, pytest.raises(SourceUnavailable):
        source.size("k")
    with pytest.raises(SourceRefused, match="no address"):
        PeerSource(PeerAddress("ftp://x", "t"))
    agent.answer = lambda begin, end: (422, b"nothing")
    with PeerSource(agent.address) as source, pytest.raises(SourceMissing, match="nothing"):
        source.size("k")


def test_a_connection_that_died_while_idle_is_opened_again(agents: list[FakeAgent]) -> None:
    view = memoryview(bytearray(10))
    with PeerSource(agents[0].address) as source:
        source.read_into("k", 0, view, within_s=5)
        source._open[0].sock.shutdown(2)
        assert source.read_into("k", 0, view, within_s=5) == 10


def test_ranges_go_to_the_peer_with_least_to_do_and_not_to_one_that_failed() -> None:
    now = [100.0]

    class One:
        range_bytes, threads = 1, 1

        def __init__(self, name: str) -> None:
            self.name, self.fails, self.asked = name, False, 0

        def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
            self.asked += 1
            if self.fails:
                raise SourceUnavailable("down")
            return len(view)

    first, second = One("a"), One("b")
    peers = Peers([first, second], lambda: now[0])  # type: ignore[list-item]
    view = memoryview(bytearray(1))
    first.fails = True
    with pytest.raises(SourceUnavailable):
        peers.read_into("k", 0, view, within_s=1)
    for _ in range(5):
        peers.read_into("k", 0, view, within_s=1)
    assert (first.asked, second.asked) == (1, 5)
    now[0] += AVOID_S + 1
    first.fails = False
    peers.read_into("k", 0, view, within_s=1)
    assert first.asked == 2


# --- which way --------------------------------------------------------------------------------------------------


def test_the_quickest_way_first_and_of_equals_the_one_without_a_network() -> None:
    origins = [Origin("store", 1.0), Origin("peer", 2.0), Origin("make", 1.0), Origin("disk", 3.0)]
    assert [origin.kind for origin in rank(origins)] == ["make", "store", "peer", "disk"]
    assert is_worth_keeping(3.0, 1.0) and not is_worth_keeping(1.2, 1.0) and not is_worth_keeping(0.3, 0.01)


def test_rates_are_learnt_remembered_and_survive_damage(tmp_path: Path) -> None:
    path = tmp_path / "rates"
    rates = Rates(path)
    prior = rates.of("peer")
    rates.learn("peer", 100, 1e-9)
    assert rates.of("peer") == prior
    rates.learn("peer", 10 << 20, 1.0)
    rates.learn("peer", 30 << 20, 1.0)
    assert Rates(path).of("peer") == 20 << 20
    for damage in (b"", b"[]", b'{"peer": "x"}', b'{"peer": NaN}', b'{"peer": 0}'):
        path.write_bytes(damage)
        assert Rates(path).of("peer") == prior


def test_a_form_has_one_name_everywhere_and_another_for_anything_else(manifest: Manifest) -> None:
    name = form_name(manifest.identity, recipe_name("float32"))
    assert name == form_name(manifest.identity, recipe_name("float32")) and len(name) == 64
    assert name != form_name(manifest.identity, recipe_name("bfloat16"))
    assert name != form_name("0" * 64, recipe_name("float32"))
    assert plan_form(manifest, "float32").recipe == recipe_name("float32")


def test_kept_forms_can_be_forgotten(form: PreparedFile, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "objects")
    kept = StoredForms(store)
    kept.keep(form)
    assert forget_checkpoint(store, form.identity).objects == 2
    name = form_name(form.identity, form.recipe)
    assert kept.head(name) is None and list(store.list("forms/")) == []
    disk = DiskForms(DiskTier(tmp_path / "disk", 1000))
    assert not disk.keep(form) and disk.head(name) is None


def test_a_manifest_of_an_earlier_version_is_made_again_where_forms_are_loaded(tmp_path: Path) -> None:
    manifest = import_model(f"file://{make_tiny_llama(tmp_path / 'tiny')}", tmp_path / "models")
    as_version_1(manifest)
    load_form(FormOrder(str(manifest.path), "float32", str(tmp_path / "f.prepared")))
    assert Manifest.load(manifest.path) == manifest


def test_keeping_a_form_removes_what_a_killed_writer_left_on_disk(order: FormOrder, tmp_path: Path) -> None:
    order = replace(order, disk=str(tmp_path / "disk"), disk_bytes=1 << 30)
    load_form(order)
    half = tmp_path / "disk" / ("a" * 64) / ".0.chunk.abc123.tmp"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    keep_form(fast(order), 1000.0)
    assert not half.exists()
