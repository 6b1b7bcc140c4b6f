"""A form copied from where somebody made it before, group by group in the order the model needs, every chunk verified.

The layout is planned from the manifest as if the form were made here, and the source's head must agree with it to the
byte; the copy's own list of chunks must come out as the source's. Limits: a copy that fails leaves nothing; whoever
asked may make the form instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from model_loader.errors import IntegrityError
from model_loader.forms.head import FormHead
from model_loader.manifest import Manifest
from model_loader.prepared_writer import PreparedWriter
from model_loader.progress import Progress, Reporter
from model_loader.ranges.reader import Span, VerifiedReader
from model_loader.ranges.source import RangeSource, ReadStats
from model_loader.recipe import plan_form


def copy_form(
    manifest: Manifest,
    dtype: str,
    out_path: Path,
    name: str,
    head: FormHead,
    sources: Sequence[RangeSource],
    progress: Callable[[Progress], None] | None = None,
    *,
    threads: int = 0,
    recycle: Path | None = None,
    on_complete: Callable[[], None] | None = None,
    is_last_resort: bool = False,
) -> ReadStats:
    """`sources` have the form's body as the file `name` and are asked in their order. The rest is as in
    `recipe.prepare`."""
    planned = plan_form(manifest, dtype)
    layout = planned.layout()
    head.check_is(layout, sources[0].name)
    body_offset = layout.preamble.body_offset
    reporter = Reporter("copy", head.preamble.body_bytes, progress)
    with PreparedWriter(
        out_path,
        manifest.identity,
        planned.recipe,
        dtype,
        planned.plans,
        groups=planned.groups,
        recycle=recycle,
        is_last_resort=is_last_resort,
    ) as writer:
        reader = VerifiedReader({name: head.chunks}, sources, threads=threads)
        writer.follow(reader.stats, head.preamble.body_bytes if reader.is_far(name) else 0, reader.threads)
        if progress is not None:
            progress(Progress("arriving", 0, head.preamble.body_bytes, str(writer.temporary)))

        landing = _Landing(writer, reporter)
        # What lies between tensors is copied with them: in memory that is used again it is not zero.
        begins = [
            body_offset,
            *(layout.places[plan.name] for plan in planned.plans[1:]),
            body_offset + head.preamble.body_bytes,
        ]
        spans = [
            Span(name, begin - body_offset, end - begin, begin, plan.group)
            for plan, begin, end in zip(planned.plans, begins[:-1], begins[1:], strict=True)
        ]
        reader.read(spans, landing.put, writer.landed, landing)
        writer.complete()
        if on_complete is not None:
            on_complete()
        made = writer.commit(threads=threads)
        if made != head.chunks:
            out_path.unlink(missing_ok=True)
            raise IntegrityError(f"the copy of {name[:12]} from {sources[0].name} came out different; it is removed")
    reporter.finish()
    return reader.stats


class _Landing:
    """The form's memory, and what is told of what comes."""

    def __init__(self, writer: PreparedWriter, reporter: Reporter) -> None:
        self._writer = writer
        self._reporter = reporter

    def view(self, to: int, nbytes: int) -> memoryview | None:
        return self._writer.view(to, nbytes)

    def moved(self, nbytes: int) -> None:
        self._writer.moved(nbytes)
        self._reporter.add(nbytes)

    def put(self, to: int, data: Any) -> None:
        self._writer.write(to, data)
        self.moved(memoryview(data).nbytes)
