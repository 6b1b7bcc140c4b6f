"""What slots that share no folder with this control plane are given instead: manifests, a store, files by store.

A spec is fitted to the slot it goes to: a path means something only where the folder is shared, a `file:` store is
reached over HTTP from elsewhere, with a token for this work at this slot. Files of checkpoints that lie on this machine
only are served as objects of that store, or put into the bucket that slots read. Where several gateways share a store
and no folder of models, everything lies in the store, the manifest for the other gateways, too. Limits: where slots
reach none of it, such a checkpoint is refused, in words.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from control_plane.settings import Settings
from control_plane.store_tokens import CHECKPOINTS, StoreTokens
from function_runtime.protocol import ReplicaSpec

if TYPE_CHECKING:
    from model_loader.manifest import Manifest
    from model_loader.objects import ObjectStore
    from model_loader.portable import Part

SERVED: Final = "http+stoker://"
KEPT_MANIFESTS: Final = 64
BUNDLE: Final = "manifest.bundle"


@dataclass(frozen=True, slots=True)
class Packed:
    """A manifest as it is sent."""

    manifest: Manifest
    modified_ns: int
    """When its file was last changed, as of the time it was packed."""
    parts: Sequence[Part]
    sha256: str
    """Of the manifest as it arrives there."""


class SlotFiles:
    def __init__(self, settings: Settings, tokens: StoreTokens, opened: Callable[[], ObjectStore]) -> None:
        """`opened` gives this installation's store; it is called in threads."""
        self.tokens = tokens
        self._models_dir = settings.models_dir
        self._store = settings.store_uri
        self._slots_store = settings.slot_store_uri
        self._opened = opened
        self._is_common = settings.shared and settings.store.uri.startswith(("s3:", "file:"))
        """Whether several gateways use this store, who may have nothing else in common."""
        self.slots_elsewhere = False
        """Whether there are slots that share no folder."""
        self._manifest = lru_cache(KEPT_MANIFESTS)(_load)
        self._lock = threading.Lock()
        self._packed: dict[Path, Packed] = {}

    def fit(self, spec: ReplicaSpec, slot_id: str, *, shares_files: bool, manifest_sha256: str = "") -> ReplicaSpec:
        """The same replica for this slot, wherever the spec was made for."""
        if shares_files:
            store = self._store if spec.kv_store else ""
            return msgspec.structs.replace(spec, manifest_sha256="", kv_store=store, store_token="")
        store = self._slots_store if spec.kv_store else ""
        token = self.token(slot_id, spec.tenant, spec.identity, shares=spec.shares_kv)
        return msgspec.structs.replace(spec, manifest_sha256=manifest_sha256, kv_store=store, store_token=token)

    def token(self, slot_id: str, tenant: str, identity: str, *, shares: bool = False) -> str:
        """Empty where slots ask a bucket, with credentials of their own."""
        served = self._slots_store.startswith(SERVED)
        return self.tokens.of(slot_id, tenant, identity, shares=shares) if served else ""

    def at_hand(self, manifest_path: str) -> Packed | None:
        """What `parts` would give, where nothing has to be read for it but when the file was changed: a start that goes
        by a thread waits for it behind all that the event loop has to do. None: ask `parts`."""
        path = Path(manifest_path)
        known = self._packed.get(path)
        try:
            return known if known is not None and path.stat().st_mtime_ns == known.modified_ns else None
        except OSError:
            return None

    # --- in threads ---

    def parts(self, manifest_path: str) -> Packed:
        """What a slot elsewhere is sent of a checkpoint. Raises LoaderError."""
        path = self.locate(manifest_path)
        modified_ns = _modified_ns(path)
        manifest = self._manifest(path, modified_ns)
        with self._lock:
            known = self._packed.get(path)
        if known is not None and known.manifest is manifest:
            return known
        from model_loader.portable import pack

        parts = pack(manifest, lambda number: self._origin(manifest, number))
        packed = Packed(manifest, modified_ns, parts, hashlib.sha256(parts[0].read()).hexdigest())
        with self._lock:
            self._packed[path] = packed
            while len(self._packed) > KEPT_MANIFESTS:
                del self._packed[next(iter(self._packed))]
        return packed

    @property
    def publishes(self) -> bool:
        """Whether what one gateway imports has to be in the store, for gateways and slots that share no folder."""
        return self._is_common and self.slots_elsewhere and bool(self._slots_store)

    def publish(self, manifest_path: str) -> None:
        """Raises LoaderError."""
        from model_loader.portable import bundle

        store, key = self._opened(), f"models/{Path(manifest_path).parent.name}/{BUNDLE}"
        if self.publishes and store.exists(key) is None:
            store.put(key, *bundle(self.parts(manifest_path).parts))  # after the weights: who finds it finds them

    def locate(self, manifest_path: str) -> Path:
        """The manifest on this machine, wherever it was imported; fetched where only the store has it. Raises
        LoaderError."""
        path = Path(manifest_path)
        if path.exists() or not self.publishes:
            return path
        identity = path.parent.name
        here = self._models_dir / identity / path.name
        if not here.exists():
            self._fetch(identity, here.parent)
        return here

    def _fetch(self, identity: str, target: Path) -> None:
        from model_loader.portable import admit, unbundle

        raw = self._opened().get(f"models/{identity}/{BUNDLE}")
        self._models_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".arriving-", dir=self._models_dir) as folder:
            aside = Path(folder) / "manifest"
            aside.mkdir()
            unbundle(raw, aside)
            admit(aside, identity)
            with contextlib.suppress(OSError):  # somebody else was quicker
                aside.rename(target)

    def checkpoint_file(self, identity: str, number: int) -> Path:
        """The file of a checkpoint of this installation, as its manifest names it. Raises MissingObject."""
        from model_loader.errors import LoaderError, MissingObject

        unknown = MissingObject(f"there is no file {number} of a checkpoint {identity[:16]} here")
        if len(identity) != 64 or not identity.isalnum():
            raise unknown
        try:
            path = self._models_dir / identity / "manifest.json"
            files = self._manifest(path, _modified_ns(path)).files
        except LoaderError as error:
            raise MissingObject(str(error)) from error
        if number >= len(files):
            raise unknown
        return Path(files[number].path)

    def _origin(self, manifest: Manifest, number: int) -> tuple[str, str]:
        """Where slots get a file that lies on this machine."""
        from model_loader.errors import SourceRefused

        if self.publishes or self._slots_store.startswith("s3:"):
            return self._slots_store, self._published(manifest, number)
        if self._slots_store.startswith(SERVED):
            return self._slots_store, f"{CHECKPOINTS}{manifest.identity}/{number}"
        raise SourceRefused(
            f"{manifest.uri} lies on the control plane's machine, which slots elsewhere cannot reach: set "
            "STOKER_ADVERTISE_URL so that it is served, or STOKER_STORE to a bucket"
        )

    def _published(self, manifest: Manifest, number: int) -> str:
        """Put into the store once, under its content's name."""
        content = manifest.contents[number]
        key = f"models/{manifest.identity}/{content.sha256}"
        store = self._opened()
        if store.exists(key) != content.nbytes:
            with Path(manifest.files[number].path).open("rb") as file:
                if content.nbytes:
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                        store.put(key, view)
                else:
                    store.put(key)
        return key


def _modified_ns(path: Path) -> int:
    """Raises LoaderError."""
    from model_loader.errors import SourceMissing

    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        raise SourceMissing(f"the manifest {path} is gone: import the model again ({error.strerror})") from error


def _load(path: Path, modified_ns: int) -> Manifest:
    from model_loader.manifest import Manifest

    return Manifest.load(path)
