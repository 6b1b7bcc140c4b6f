"""The whole suite side by side, and a second hearing, alone, for the few tests that failed beside others.

`python -m tests.support.hearing [pytest's arguments]` runs pytest with them. Where all that failed are at most `MOST`
tests, they are run again one after the other with nothing beside them, and that run decides, as in CPython's own suite
(`regrtest --rerun`). Both runs are printed, with what failed in each, and the last line names the tests that passed
only alone: they are to be mended, but what a busy machine does to a test is no verdict on the change before it.
Limits: nothing under `tests/chaos` is heard twice: what random faults bring to light may not come a second time.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

MOST: Final = 3


class Failures:
    """What failed, as the reports of all workers come in."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.names:
            self.names.append(report.nodeid)

    @property
    def may_be_heard_again(self) -> bool:
        return 0 < len(self.names) <= MOST and not any(name.startswith("tests/chaos/") for name in self.names)


def main(arguments: list[str]) -> int:
    failures = Failures()
    code = pytest.main(arguments, plugins=[failures])
    if code != pytest.ExitCode.TESTS_FAILED or not failures.may_be_heard_again:
        return int(code)
    names = " ".join(failures.names)
    print(f"\nThese failed beside other tests; once more, alone: {names}", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", *failures.names], check=False)
    print(f"Failed beside other tests, {'passed' if again.returncode == 0 else 'failed'} alone: {names}", flush=True)
    return again.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
