"""What a replica is told depends on where it goes: paths where the folder is shared, a store and a token elsewhere."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from control_plane.backends.agent_client import AgentClient
from control_plane.backends.base import SlotRefused
from control_plane.backends.linked import LinkedSlots
from control_plane.backends.slot_files import SlotFiles
from control_plane.environment import BadVariable, apply_environment
from control_plane.errors import ModelUnusable
from control_plane.gateway.prompts import PromptMakers
from control_plane.settings import AgentPlace, GatewaySettings, Settings, SlotSettings, StoreSettings
from control_plane.store_tokens import StoreTokens
from function_runtime.protocol import EngineOptions, Peer, ReplicaSpec, ReplicaState, ReplicaStatus
from model_loader.errors import MissingObject, SourceRefused
from model_loader.forms.sweeping import forget_checkpoint
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from model_loader.objects import DirectoryStore
from tests.support.checkpoints import make_tiny_llama

TOKENS = StoreTokens(b"s" * 32)
BUCKET = "s3://bucket/prefix"
SERVICE = "http+stoker://stoker.namespace:8080"


def files_of(folder: Path, store: str = "", url: str = "", opened: Any = None) -> SlotFiles:
    settings = Settings(data_dir=folder, store=StoreSettings(store), gateway=GatewaySettings(url=url))
    return SlotFiles(settings, TOKENS, opened or (lambda: DirectoryStore(settings.objects_dir)))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """A data directory with one imported checkpoint."""
    folder = tmp_path_factory.mktemp("home")
    return folder, import_model(f"file://{make_tiny_llama(folder / 'tiny')}", folder / "models")


def spec_of(manifest: Manifest | None = None, **fields: Any) -> ReplicaSpec:
    path, identity = (str(manifest.path), manifest.identity) if manifest is not None else ("/m/manifest.json", "ab")
    return ReplicaSpec("rep-1", "f", 1, "default", path, identity, EngineOptions(), kv_store="file:///x", **fields)


def test_a_spec_goes_from_one_kind_of_slot_to_the_other_and_back(tmp_path: Path) -> None:
    files = files_of(tmp_path, url="http://10.0.0.1:8080")
    far = files.fit(spec_of(), "slot-7", shares_files=False, manifest_sha256="ab" * 32)
    assert (far.manifest_sha256, far.kv_store) == ("ab" * 32, "http+stoker://10.0.0.1:8080")
    claims = TOKENS.read(far.store_token)
    assert claims is not None and (claims.slot_id, claims.tenant, claims.identity) == ("slot-7", "default", "ab")
    other = files.fit(msgspec.structs.replace(far, tenant="other"), "slot-7", shares_files=False)
    assert other.store_token != far.store_token, "a slot that works for another tenant has another token"
    near = files.fit(far, "slot-0", shares_files=True)
    assert (near.manifest_sha256, near.store_token, near.kv_store) == ("", "", (tmp_path / "objects").as_uri())
    without = files.fit(msgspec.structs.replace(spec_of(), kv_store=""), "slot-7", shares_files=False)
    assert without.kv_store == "", "a function that stores nothing was given a store"


@pytest.mark.parametrize(
    ("store", "url", "found"),
    [
        ("", "", ""),
        ("", "http://10.0.0.1:8080/", "http+stoker://10.0.0.1:8080"),
        ("http+stoker://stoker:8080", "http://10.0.0.1:8080", "http+stoker://stoker:8080"),
        ("", "https://10.0.0.1:8080/", ""),
        (BUCKET, "http://10.0.0.1:8080", BUCKET),
    ],
)
def test_a_store_is_reached_by_slots_as_it_can_be(tmp_path: Path, store: str, url: str, found: str) -> None:
    settings = Settings(data_dir=tmp_path, store=StoreSettings(store), gateway=GatewaySettings(url=url))
    assert settings.slot_store_uri == found
    assert settings.store_uri == (BUCKET if store == BUCKET else (tmp_path / "objects").as_uri())
    assert (files_of(tmp_path, store, url).token("slot-1", "t", "ab") != "") == found.startswith("http+stoker:")


def test_files_of_this_machine_are_served_or_put_into_the_bucket_or_refused(home: tuple[Path, Manifest]) -> None:
    folder, manifest = home
    served = files_of(folder, url="http://10.0.0.1:8080").parts(str(manifest.path)).parts
    content = msgspec.json.decode(served[0].read())["contents"][0]
    key = f"checkpoints/{manifest.identity}/0"
    assert (content["origin"], content["key"]) == ("http+stoker://10.0.0.1:8080", key)
    bucket = DirectoryStore(folder / "bucket")
    for _ in range(2):
        parts = files_of(folder, BUCKET, opened=lambda: bucket).parts(str(manifest.path)).parts
    content = msgspec.json.decode(parts[0].read())["contents"][0]
    assert content["origin"] == BUCKET and bucket.stats.snapshot().kinds["put"].requests == 1
    assert bucket.get(content["key"]) == Path(manifest.files[0].path).read_bytes()
    with pytest.raises(SourceRefused, match="STOKER_ADVERTISE_URL"):
        files_of(folder).parts(str(manifest.path))


@pytest.mark.parametrize("served", [False, True], ids=["bucket", "common folder"])
async def test_a_gateway_that_did_not_import_a_model_finds_its_manifest_in_the_store(
    home: tuple[Path, Manifest], tmp_path: Path, served: bool
) -> None:
    folder, manifest = home
    bucket = DirectoryStore(tmp_path / "bucket")

    def gateway(data_dir: Path) -> SlotFiles:
        where = StoreSettings("file:///objects", slots_uri=SERVICE) if served else StoreSettings(BUCKET)
        settings = Settings(data_dir=data_dir, store=where, gateway=GatewaySettings(shared=True))
        files = SlotFiles(settings, TOKENS, lambda: bucket)
        files.slots_elsewhere = True
        return files

    one, two = gateway(folder), gateway(tmp_path / "two")
    gone = str(tmp_path / "one" / "models" / manifest.identity / "manifest.json")
    makers = PromptMakers()
    makers.locate = two.locate
    with pytest.raises(ModelUnusable):
        await makers.get(gone)
    for _ in range(2):
        one.publish(str(manifest.path))
    assert [info.key.rpartition("/")[0] for info in bucket.list("models/")] == [f"models/{manifest.identity}"] * 2
    assert (await makers.get(gone)).manifest.identity == manifest.identity
    (found,) = (tmp_path / "two" / "models").iterdir()
    assert found.name == manifest.identity and two.locate(gone).parent == found
    (content,) = two.parts(gone).manifest.contents
    assert content.origin == (SERVICE if served else BUCKET) and bucket.exists(content.key) == content.nbytes
    assert two.parts(gone).sha256 == one.parts(str(manifest.path)).sha256, "slots would be sent it by both"
    forget_checkpoint(bucket, manifest.identity)
    assert not list(bucket.list("models/")), "a removed model left its weights in the bucket"


def test_a_checkpoints_file_is_named_by_its_manifest_alone(home: tuple[Path, Manifest]) -> None:
    folder, manifest = home
    files = files_of(folder)
    assert files.checkpoint_file(manifest.identity, 0) == Path(manifest.files[0].path)
    for identity, number in ((manifest.identity, 9), ("ab" * 32, 0), ("../" + "a" * 61, 0), ("", 0)):
        with pytest.raises(MissingObject):
            files.checkpoint_file(identity, number)


class _Agent:
    """An agent that lacks what it has not been sent."""

    def __init__(self) -> None:
        self.has: dict[str, list[str]] = {}
        self.asked: list[ReplicaSpec] = []
        self.as_peer = Peer("http://127.0.0.1:1", "t")

    async def start_replica(self, spec: ReplicaSpec) -> ReplicaStatus:
        self.asked.append(spec)
        if spec.manifest_sha256 and spec.manifest_sha256 not in self.has:
            raise SlotRefused("manifest_missing", "send it first")
        return ReplicaStatus(spec.replica_id, spec.function, 1, ReplicaState.STARTING, spec)

    async def put_manifest(self, identity: str, parts: Any) -> None:
        self.has[hashlib.sha256(parts[0].read()).hexdigest()] = [identity, *(part.name for part in parts)]


class _Link:
    def __init__(self, agent: _Agent, *, shares_files: bool) -> None:
        self.agent, self.shares_files = agent, shares_files


async def test_a_slot_elsewhere_is_sent_a_manifest_once_and_no_peer_of_this_machine(
    home: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, manifest = home
    slots, far, near = LinkedSlots(), _Agent(), _Agent()
    slots.files = files_of(folder, url="http://10.0.0.1:8080")
    links: dict[str, Any] = {"far": _Link(far, shares_files=False), "near": _Link(near, shares_files=True)}
    slots._links = links
    peers = (near.as_peer, Peer("http://10.0.0.9:7070", "t"))
    for _ in range(2):
        await slots.start_replica("far", spec_of(manifest, peers=peers))
    assert [spec.manifest_sha256 for spec in far.asked] == [*far.has] * 3
    assert [peer.url for peer in far.asked[0].peers] == ["http://10.0.0.9:7070"]
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "to_thread", None)
        await slots.start_replica("far", spec_of(manifest, peers=peers))
        assert len(far.asked) == 4, "what was sent before, and has not changed, is not read anew"
    (sent,) = far.has.values()
    assert sent[:3] == [manifest.identity, "manifest.json", "tokenizer.json"]
    await slots.start_replica("near", far.asked[0])
    assert not near.asked[0].manifest_sha256 and not near.has
    slots.files = files_of(folder, url="http://10.0.0.2:8080")
    await slots.start_replica("far", spec_of(manifest))
    assert len(far.has) == 2, "a slot went by a manifest of yesterday's address"
    slots.files = files_of(folder)
    with pytest.raises(SlotRefused, match="model_refused") as refused:
        await slots.start_replica("far", spec_of(manifest))
    assert refused.value.code == "model_refused"


def test_agents_elsewhere_are_named_by_address() -> None:
    told = {"STOKER_AGENTS": "a=10.0.0.7:7070, b=[fd00::1]:7071", "STOKER_AGENT_SECRET_FILE": "/run/secret"}
    settings = apply_environment(Settings(data_dir=Path("/x")), told).slot
    assert settings.agents == (AgentPlace("a", "10.0.0.7", 7070), AgentPlace("b", "fd00::1", 7071))
    assert settings.agent_secret_file == "/run/secret" and SlotSettings().agents == ()
    for wrong in ("a", "a=host", "a=host:x", "A=h:1", "a=h:1,a=h:2", "=h:1"):
        with pytest.raises(BadVariable):
            apply_environment(Settings(data_dir=Path("/x")), {"STOKER_AGENTS": wrong})


def test_an_agent_with_an_ipv6_address_is_reached_by_its_url() -> None:
    from function_runtime.protocol import AgentInfo

    assert AgentClient(AgentInfo("s", 0, "fd00::7", 7070, "t", "")).as_peer.url == "http://[fd00::7]:7070"
