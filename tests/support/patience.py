"""How long a test waits for what it knows will come, and what it raises when it did not.

A bound on a wait is there so that a test that hangs ends: it says nothing about how fast anything is, and costs nothing
where the thing comes. It is long for the slowest machine that runs the tests beside others.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 60.0


class NotInTime(TimeoutError):
    """It did not come."""
