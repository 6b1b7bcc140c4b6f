"""`stoker simulate`: what autoscalers would have cost on recorded traffic, or on this service's own.

Reads, chooses, draws, replays, shows: tables on standard output, CSV and pictures into a folder. Limits: one process;
the traffic of a day of a few functions takes seconds, two weeks of sixty functions minutes for each policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from control_plane.cli.connection import connect
from control_plane.cli.failure import USAGE, CommandError
from control_plane.cli.output import note, print_json, progress
from control_plane.errors import StokerError

if TYPE_CHECKING:
    from autoscaler.simulator.workload import SimFunction, Workload
    from control_plane.simulation.lengths import TokenLengths
    from control_plane.simulation.study import Plan, Row
    from control_plane.simulation.trace import Trace

GB: Final = 10**9
DAY_S: Final = 86_400.0
_SLOTS: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,2})")


@dataclass(frozen=True, slots=True)
class Asked:
    """The command's options."""

    traces: tuple[Path, ...]
    from_journal: bool
    days: float | None
    learn_days: float
    category: str | None
    functions: int | None
    max_requests: int
    thin: float
    export: Path | None
    policies: tuple[str, ...]
    weights: tuple[float, ...]
    slots: str
    device_memory_gb: float
    pool_gb: float
    models_b: tuple[float, ...]
    objective_s: float
    prompt_tokens: float | None
    output_tokens: float | None
    price_usd: float
    seed: int
    out: Path | None


def sizes_of(told: str) -> tuple[float, ...]:
    """`1,8,70`: billions of parameters."""
    try:
        sizes = tuple(float(part) for part in told.split(",") if part.strip())
    except ValueError:
        sizes = ()
    if not sizes or not all(0 < size <= 1000 for size in sizes):
        raise CommandError(
            f"--models is a list of billions of parameters, like 1,8,70, not {told!r}", code="bad_option", status=USAGE
        )
    return sizes


def run_simulation(data_dir: Path | None, url: str | None, asked: Asked, as_json: bool) -> None:
    try:
        _run(data_dir, url, asked, as_json)
    except StokerError as error:
        raise CommandError(error.message, code=error.code) from error


def _run(data_dir: Path | None, url: str | None, asked: Asked, as_json: bool) -> None:
    if not 0 < asked.thin <= 1:
        raise CommandError(f"--thin is above 0 and at most 1, not {asked.thin:g}", code="bad_option", status=USAGE)
    if bool(asked.traces) == asked.from_journal:
        raise CommandError(
            "give recorded traffic with --trace FILE, or replay this service's own with --from-journal",
            code="bad_option", status=USAGE,
        )  # fmt: skip
    if asked.export is not None and not asked.from_journal:
        raise CommandError("--export writes what --from-journal reads", code="bad_option", status=USAGE)
    machines = _SLOTS.fullmatch(asked.slots)
    if machines is None:
        raise CommandError(f"--slots is SLOTSxDEVICES, like 8x8, not {asked.slots!r}", code="bad_option", status=USAGE)
    from control_plane.simulation.study import compare

    with progress("simulate", quiet=as_json) as bar:

        def advance(what: str) -> None:
            bar(what, 0, 0)

        trace, functions = _own(data_dir, url, asked, advance) if asked.from_journal else _recorded(asked, advance)
        plan = _plan(trace, functions, asked, int(machines[1]), int(machines[2]))
        rows = compare(plan, asked.policies, advance)
    _show(rows, trace, plan, asked, as_json)


def _lengths(asked: Asked) -> TokenLengths:
    from dataclasses import replace

    from control_plane.simulation.lengths import TokenLengths

    usual = TokenLengths()
    return replace(
        usual,
        prompt_p50=asked.prompt_tokens or usual.prompt_p50,
        output_p50=asked.output_tokens or usual.output_p50,
    )


def _own(
    data_dir: Path | None, url: str | None, asked: Asked, advance: Callable[[str], None]
) -> tuple[Trace, tuple[SimFunction, ...]]:
    from control_plane.simulation.journal import from_journal
    from control_plane.simulation.measured import write_measured
    from control_plane.simulation.own_traffic import write_own_traffic

    own = from_journal(connect(data_dir, url), 7.0 if asked.days is None else asked.days, advance)
    if asked.export is not None:
        write_own_traffic(asked.export, own.trace)
        write_measured(asked.export, own.functions)
        note(f"{len(own.trace):,} requests written to {asked.export}")
    return own.trace.thinned(asked.thin, asked.seed), own.functions


def _recorded(asked: Asked, advance: Callable[[str], None]) -> tuple[Trace, tuple[SimFunction, ...]]:
    from control_plane.simulation.formats import read
    from control_plane.simulation.measured import with_measured
    from control_plane.simulation.rates import Rates, at_quantiles
    from control_plane.simulation.sizes import functions_of
    from control_plane.simulation.trace import together

    until_s = float("inf") if asked.days is None else asked.days * DAY_S
    read_in: list[Trace] = []
    for path in asked.traces:
        advance(f"reading {path.name}")
        found = read(path, asked.category)
        if asked.days is not None:
            found = found.between(0.0, until_s)
        totals = found.requests_by_function()
        wanted = len(totals) if asked.functions is None else asked.functions
        places = at_quantiles(totals, wanted, int(asked.max_requests / asked.thin))
        if not places:
            raise CommandError(
                f"{path}: not one of its functions has as few as {asked.max_requests:,} requests",
                "thin them with --thin SHARE, take fewer days, or raise --max-requests",
                code="too_many_requests",
            )
        if len(places) < len(totals):
            found = found.of_functions(places)
        found = found.thinned(asked.thin, asked.seed)
        read_in.append(found.drawn(_lengths(asked), asked.seed) if isinstance(found, Rates) else found)
    trace = together(read_in)
    functions: tuple[SimFunction, ...] = functions_of(
        trace.names, trace.tenants, asked.models_b, int(asked.device_memory_gb * GB), asked.objective_s
    )
    for path in asked.traces:
        functions = with_measured(path, trace, functions)
    return trace, functions


def _plan(trace: Trace, functions: tuple[SimFunction, ...], asked: Asked, slots: int, devices: int) -> Plan:
    from autoscaler.simulator.cluster import Cluster
    from autoscaler.simulator.workload import Workload
    from control_plane.simulation.study import Plan

    workload: Workload = Workload(
        functions, trace.arrival_s, trace.function, trace.prompt_tokens, trace.output_tokens, trace.origin_s
    )
    until_s = min(trace.length_s, asked.days * DAY_S) if asked.days is not None else trace.length_s
    last_s = float(trace.arrival_s[-1]) if len(trace) else 0.0
    until_s = max(until_s, last_s) + 1e-3
    since_s = asked.learn_days * DAY_S
    if not since_s < last_s:
        raise CommandError(
            f"nothing is left to score: {asked.learn_days:g} days are to learn from, and the last request "
            f"comes after {last_s / DAY_S:.2f} days",
            "give fewer --learn-days",
            code="bad_option", status=USAGE,
        )  # fmt: skip
    too_wide = [function.name for function in functions if function.devices > devices]
    if too_wide:
        raise CommandError(
            f"{too_wide[0]} needs more devices than the {devices} of a slot",
            "give larger slots with --slots, more --device-memory, or smaller --models",
            code="bad_option", status=USAGE,
        )  # fmt: skip
    cluster = Cluster(
        slots=slots,
        devices_per_slot=devices,
        device_bytes=int(asked.device_memory_gb * GB),
        pool_bytes=int(asked.pool_gb * GB),
    )
    return Plan(workload, cluster, asked.weights, since_s, until_s, asked.price_usd, asked.seed)


def _told(trace: Trace, plan: Plan, asked: Asked) -> list[str]:
    """Everything a reader has to know about where the numbers come from."""
    from control_plane.simulation.measured import beside
    from control_plane.simulation.sizes import told

    scored = int((trace.arrival_s >= plan.since_s).sum())
    lines = [
        f"{trace.source}: {scored:,} scored requests of {len(trace):,}, {len(trace.names)} functions, "
        f"{(plan.until_s - plan.since_s) / 3600:.1f} h after {plan.since_s / 3600:.1f} h to learn from; "
        f"{plan.cluster.slots} slots of {plan.cluster.devices_per_slot} devices; seed {plan.seed}",
        *trace.notes,
    ]
    measured = asked.from_journal or all(beside(path).exists() for path in asked.traces)
    return lines if measured else [*lines, told(asked.models_b)]


def _show(rows: Sequence[Row], trace: Trace, plan: Plan, asked: Asked, as_json: bool) -> None:
    from control_plane.simulation import pictures, tables

    notes = _told(trace, plan, asked)
    written: list[str] = []
    if asked.out is not None:
        try:
            asked.out.mkdir(parents=True, exist_ok=True)
            tables.write_summary(asked.out / "summary.csv", rows)
            tables.write_functions(asked.out / "functions.csv", rows)
            tables.write_series(asked.out / "series.csv", rows)
            (asked.out / "over_time.svg").write_text(pictures.over_time(rows, notes).svg(), encoding="utf-8")
            (asked.out / "cost.svg").write_text(pictures.cost_against_waiting(rows, notes).svg(), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{asked.out} cannot be written: {error.strerror or error}") from error
        written = ["summary.csv", "functions.csv", "series.csv", "over_time.svg", "cost.svg"]
    if as_json:
        told = [{**tables.record(row), "share_of_way_to_oracle": tables.closed(rows, row)} for row in rows]
        print_json({"object": "simulation", "notes": notes, "data": told, "files": written})
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 2 * tables.WIDE)  # a file has no edge to wrap at
    for line in notes:
        console.print(line, markup=False, style="dim")
    for weight in plan.weights:
        console.print()
        console.print(tables.table(rows, weight, console.width))
        own = next((row for row in rows if row.weight == weight and row.policy == "stoker"), None)
        share = None if own is None else tables.closed(rows, own)
        if share is not None:
            console.print(f"stoker is {100 * share:.0f} % of the way from the best peer to the oracle")
    if written:
        note(f"{asked.out}: {', '.join(written)}")
