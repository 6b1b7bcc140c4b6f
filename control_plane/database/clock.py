"""The time that is written down and reckoned with: that of the database, whatever a gateway's own clock says.

    one gateway writes when a request was accepted, a period began, a drain was over; another reckons with it

PostgreSQL tells its time with each renewal of a gateway's lease, and the monotonic clock carries it on, so that a
machine whose clock is wrong or jumps neither ends adopted requests nor forgets too early. Limits: off by half of what
asking took; until it was told once, and with a database of one machine, it is the machine's clock.
"""

from __future__ import annotations

import time
from typing import Final

from control_plane.database.connection import Connection

_TELL: Final = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"


class Clock:
    def __init__(self, *, asks: bool) -> None:
        """`asks`: the database is a server with a clock of its own."""
        self._asks = asks
        self._began_us = 0
        """What the database's clock said when the monotonic one was at 0; 0: not told yet."""

    def ask(self, connection: Connection) -> None:
        """Within any transaction, in the database's thread."""
        if not self._asks:
            return
        sent_ns = time.monotonic_ns()
        told_us = int(connection.execute(_TELL).fetchone()[0])
        self._began_us = told_us - (sent_ns + time.monotonic_ns()) // 2000

    def now_us(self) -> int:
        """Microseconds since 1970."""
        return self._began_us + time.monotonic_ns() // 1000 if self._began_us else time.time_ns() // 1000

    @property
    def ahead_s(self) -> float:
        """How far this machine's clock is ahead of it."""
        return time.time() - self.now_us() / 1e6
