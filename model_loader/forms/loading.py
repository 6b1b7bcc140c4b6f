"""Getting a form: from the disk tier, from other slots' pools, from the object store, or by the recipe, the quickest
first; what fails falls back to the next, until there is none.

`python -m model_loader.forms.loading` waits for one order (a line of JSON) on stdin, since it holds tokens, and tells
progress and outcome as NDJSON on stdout. `--keep` instead stores a form that is complete where that is worth it, and
`--huge` puts one into huge pages that had to do without.
Limits: which way is taken is decided once, before the first byte; a source that becomes slow is not left for another.
"""

from __future__ import annotations

import os

# NOTE: must precede numpy's first import; BLAS is not used here and its threads cost milliseconds of start.
if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model_loader.disk_tier import DiskTier
from model_loader.errors import LoaderError, OutOfSpace, SourceMissing
from model_loader.file_memory import make_huge
from model_loader.forms.copying import copy_form
from model_loader.forms.head import BodyOf, FormHead, form_name
from model_loader.forms.kept import DiskForms, StoredForms, sweep_heads
from model_loader.forms.order import FormOrder
from model_loader.forms.origin import MAKE, Origin, Rates, is_worth_keeping, rank
from model_loader.llama_layout import recipe_name
from model_loader.manifest import Manifest
from model_loader.objects.location import TOKEN_VARIABLE
from model_loader.prepared import PreparedFile
from model_loader.progress import LEFT, Progress, run_reporting
from model_loader.ranges.peer import Peers, PeerSource
from model_loader.ranges.source import RangeSource, ReadStats
from model_loader.recipe import current_manifest, plan_form, prepare

RATES_NAME: Final = ".rates.json"
NAME_AT_WORK: Final = "stoker-load"
"""In lists of processes, where one that waits is a Python like others."""
PARTLY: Final = 0.5
"""A disk tier that has less than this share of a form is no place to begin from."""
ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    kind: str
    """Where it came from: disk | peer | store | make"""
    stats: ReadStats
    seconds: float
    tried: tuple[str, ...] = ()
    """What failed before, each with its reason."""


def load_form(order: FormOrder, progress: ProgressCallback | None = None) -> Loaded:
    """Writes the form that is wanted to `order.out`. Raises what making it raised, if nothing else worked either: a
    checkpoint that is not what it was costs the load only where nobody has the form."""
    manifest = current_manifest(Path(order.manifest_path))
    out = Path(order.out)
    rates = Rates(out.parent / RATES_NAME)
    name = form_name(manifest.identity, recipe_name(order.dtype))
    recycle = Path(order.recycle) if order.recycle else None
    tried: list[str] = []
    unmade: LoaderError | None = None
    with contextlib.ExitStack() as stack:
        places = _places(order, name, stack, tried)
        ways = _ranked(places, manifest, order.dtype, rates)
        for origin in ways:
            begin_s, is_last = time.monotonic(), origin is ways[-1]
            try:
                stats = _get(origin.kind, places, manifest, order, name, progress, recycle, is_last=is_last)
            except (OutOfSpace, MemoryError):
                raise
            except LoaderError as error:
                if origin.kind == MAKE:
                    unmade = error
                tried.append(f"{origin.kind}: {error}")
                recycle = None  # used up, if it got that far
                if progress is not None and not is_last:
                    progress(Progress(LEFT, 0, 0))
                continue
            seconds = time.monotonic() - begin_s
            nbytes = out.stat().st_size
            rates.learn(_rate_of(origin.kind, manifest, order.dtype), nbytes, seconds)
            if stats.bad_chunks and (disk := places.get("disk")) is not None and isinstance(disk.sources[0], DiskForms):
                disk.sources[0].mend(name)
            return Loaded(origin.kind, stats, seconds, tuple(tried))
    raise unmade or SourceMissing(f"there is no way to the form {name[:12]}: {'; '.join(tried)}")


def keep_form(order: FormOrder, make_s: float) -> dict[str, int]:
    """Keeps a complete form on disk and in the object store where reading it there would be quicker than making it
    took. Gives the bytes kept by place."""
    out, kept = Path(order.out), {"disk": 0, "store": 0}
    form = PreparedFile.open(out, verify=False)
    rates = Rates(out.parent / RATES_NAME)
    if order.disk and is_worth_keeping(make_s, rates.seconds("disk", form.nbytes)):
        tier = DiskTier(Path(order.disk), order.disk_bytes)
        if DiskForms(tier).keep(form):
            kept["disk"] = form.nbytes
        tier.sweep()
        sweep_heads(tier)
    if order.store and is_worth_keeping(make_s, rates.seconds("store", form.nbytes)):
        from model_loader.objects import open_store

        kept["store"] = StoredForms(open_store(order.store)).keep(form)
    return kept


@dataclass(frozen=True, slots=True)
class _Place:
    head: FormHead
    sources: tuple[RangeSource, ...]
    """In the order they are asked."""


def _places(order: FormOrder, name: str, stack: contextlib.ExitStack, tried: list[str]) -> dict[str, _Place]:
    """Where the form is, by kind. A place that does not answer is noted and left out."""
    places: dict[str, _Place] = {}
    if order.disk and Path(order.disk).is_dir():
        disk = DiskForms(DiskTier(Path(order.disk), order.disk_bytes))
        head = disk.head(name)
        if head is not None and disk.share(name, head) >= PARTLY:
            places["disk"] = _Place(head, (disk,))
    if order.peers and order.pool_key:
        try:
            each = [stack.enter_context(PeerSource(address)) for address in order.peers]
            peers = Peers(each)
            head = FormHead.read(peers, order.pool_key)
            # Behind all of them as one stands each alone: what one gave wrong comes from another.
            ways: list[RangeSource] = [peers, *(each if len(each) > 1 else [])]
            at = head.preamble.body_offset
            places["peer"] = _Place(head, tuple(BodyOf(way, order.pool_key, at, name) for way in ways))
        except LoaderError as error:
            tried.append(f"peer: {error}")
    if order.store:
        from model_loader.objects import open_store

        try:
            stored = StoredForms(stack.enter_context(contextlib.closing(open_store(order.store))))
            head = stored.head(name)
            if head is not None:
                places["store"] = _Place(head, (stored.source(name),))
        except LoaderError as error:
            tried.append(f"store: {error}")
    return places


def _ranked(places: dict[str, _Place], manifest: Manifest, dtype: str, rates: Rates) -> Sequence[Origin]:
    nbytes = plan_form(manifest, dtype).nbytes
    origins = [Origin(kind, rates.seconds(kind, nbytes)) for kind in places]
    return rank([*origins, Origin(MAKE, rates.seconds(_rate_of(MAKE, manifest, dtype), nbytes))])


def _rate_of(kind: str, manifest: Manifest, dtype: str) -> str:
    as_is = manifest.format == "safetensors" and manifest.config.dtype.lower() == dtype
    return "copy as is" if kind == MAKE and as_is else kind


def _get(
    kind: str,
    places: dict[str, _Place],
    manifest: Manifest,
    order: FormOrder,
    name: str,
    progress: ProgressCallback | None,
    recycle: Path | None,
    *,
    is_last: bool,
) -> ReadStats:
    out = Path(order.out)

    def landed() -> None:
        if progress is not None:
            progress(Progress("landed", 0, 0))

    if kind == MAKE:
        return prepare(
            manifest, order.dtype, out, progress, threads=order.threads, recycle=recycle, on_complete=landed,
            is_last_resort=is_last,
        )  # fmt: skip
    place = places[kind]
    others = [
        source
        for other_kind, other in places.items()
        if other_kind != kind and other.head.chunks == place.head.chunks
        for source in other.sources
    ]
    return copy_form(
        manifest, order.dtype, out, name, place.head, [*place.sources, *others], progress,
        threads=order.threads, recycle=recycle, on_complete=landed, is_last_resort=is_last,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="model_loader.forms.loading", description="Load a prepared form.")
    parser.add_argument("pool", help="whose it is, to be seen in lists of processes; the order is on stdin")
    parser.add_argument("--keep", type=float, metavar="SECONDS", help="store the form, which took so long to make")
    parser.add_argument("--huge", action="store_true", help="put the form into huge pages, while others map it")
    given = parser.parse_args(arguments)
    line = sys.stdin.buffer.readline()
    if not line.strip():
        return 0  # nothing was wanted of it
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(NAME_AT_WORK)

    def work(report: ProgressCallback) -> dict[str, object]:
        order = FormOrder.parse(line)
        if order.store_token:
            os.environ[TOKEN_VARIABLE] = order.store_token
        if given.huge:
            made, whole = make_huge(Path(order.out))
            return {"huge_bytes": made, "whole_bytes": whole}
        if given.keep is not None:
            return {"kept": keep_form(order, given.keep)}
        loaded = load_form(order, report)
        return {
            "path": order.out,
            "nbytes": os.stat(order.out).st_size,
            "origin": loaded.kind,
            "seconds": loaded.seconds,
            "read_bytes": dict(loaded.stats.by_tier()),
            "chunks": loaded.stats.chunks,
            "bad_chunks": loaded.stats.bad_chunks,
            "retries": loaded.stats.retries,
            "tried": list(loaded.tried),
        }

    return run_reporting(work)


if __name__ == "__main__":
    # One load and then the end: looking for garbage in all that was imported would cost a tenth of a small load.
    gc.disable()
    status = main()
    sys.stdout.flush()
    os._exit(status)  # whoever waits for the end need not wait for the interpreter to take itself apart
