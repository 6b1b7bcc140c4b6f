"""The whole suite side by side, and a second hearing, alone, for waits that ran out beside other tests.

`python -m tests.support.hearing [pytest's arguments]` runs pytest with them. Where all that failed are at most `MOST`
tests that waited in vain (a time-out of any kind; never a wrong value, an error or a hang that pytest ended),
they are run again one after the other with nothing beside them, and that run decides; both are printed, and the last
line names the tests. A wait that runs out because the machine is busy with other tests says nothing about the product;
one that runs out twice, or a wrong value once, does.
Limits: nothing under `tests/chaos` is heard twice: what random faults bring to light may not come a second time.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

MOST: Final = 3
IN_VAIN: Final = "waited in vain"
"""The property of a report whose test failed by a wait."""
WAITS: Final = frozenset({"TimeoutError", "TimeoutExpired", "TimeoutException", "APITimeoutError"})
"""What waits raise: ours and asyncio's, those of subprocesses, httpx's and the OpenAI client's."""


def mark(call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Where the test runs: its report says whether it failed by waiting."""
    if (
        report.failed
        and call.excinfo is not None
        and not WAITS.isdisjoint(c.__name__ for c in call.excinfo.type.__mro__)
    ):
        report.user_properties.append((IN_VAIN, True))


class Failures:
    """What failed, as the reports of all workers come in."""

    def __init__(self) -> None:
        self.in_vain: list[str] = []
        self.others: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        heard = (IN_VAIN, True) in report.user_properties and not report.nodeid.startswith("tests/chaos/")
        names = self.in_vain if heard else self.others
        if report.nodeid not in names:
            names.append(report.nodeid)

    @property
    def may_be_heard_again(self) -> bool:
        return not self.others and 0 < len(self.in_vain) <= MOST


def main(arguments: list[str]) -> int:
    failures = Failures()
    code = pytest.main(arguments, plugins=[failures])
    if code != pytest.ExitCode.TESTS_FAILED or not failures.may_be_heard_again:
        return int(code)
    print(f"\nThese waited in vain beside other tests; once more, alone: {' '.join(failures.in_vain)}", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:randomly", *failures.in_vain], check=False)
    verdict = "pass alone" if again.returncode == 0 else "do not pass alone either"
    print(f"Waited in vain beside other tests and {verdict}: {' '.join(failures.in_vain)}", flush=True)
    return again.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
