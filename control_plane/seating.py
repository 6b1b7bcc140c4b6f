"""Between the fleet and the dispatcher: a replica that is ready gets a connection and becomes a seat; a connection that
breaks is made anew while the replica lives, or the replica is ended.

Also brings home the requests of gateways that are gone (`Adoption`): those a living replica still runs are attached to,
the others wait for a new replica. What a replica holds for other gateways is left alone.
Limits: a request is attached to only under the epoch the journal has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from control_plane.dispatch import Dispatcher
from control_plane.errors import StokerError
from control_plane.fleet import GONE, Fleet
from control_plane.journal import Journal
from control_plane.lanes import Seat
from control_plane.live_request import LiveRequest
from control_plane.replica_link import LinkError, ReplicaLink
from function_runtime.protocol import STALLED_AFTER_S, ReplicaState, ReplicaStatus

logger = logging.getLogger(__name__)

CONNECT_PAUSES_S: Final = (0.0, 0.02, 0.2, 1.0)
"""Pauses before the attempts to connect to a ready replica; then it counts as unreachable."""
DEATH_NOTICE_S: Final = 0.5
"""A broken connection mostly means a death, which the agent reports within milliseconds: this long before connecting
anew."""
LOOK_FOR_S: Final = 10.0
"""An adopted request is looked for on its replica no longer than this: then another replica goes on with it, and the
epoch keeps the first one out."""
UNREACHABLE_AGAIN_S: Final = 5.0
"""Pause before a replica that others may well reach is tried once more."""
UNKNOWN_AGAIN_S: Final = 30.0
"""What a replica holds and the journal does not know may be in the middle of being accepted elsewhere; after this long
it was not."""


class Adoption:
    """Requests that may still run on a replica: they wait for it to be heard, or to be known as gone."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._waiting: dict[str, dict[str, LiveRequest]] = {}

    def hold(self, live: LiveRequest, replica_id: str) -> None:
        live.log.note = "looking for its replica"
        self._dispatcher.hold(live)
        self._waiting.setdefault(replica_id, {})[live.request_id] = live

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def expects(self, replica_id: str) -> bool:
        return replica_id in self._waiting

    def overdue(self, replica_id: str, live: LiveRequest) -> None:
        """Its replica was neither reached nor found to be gone."""
        waiting = self._waiting.get(replica_id, {})
        if waiting.get(live.request_id) is live:
            self._release({live.request_id: waiting.pop(live.request_id)}, replica_id)

    def claim(self, replica_id: str, running: Iterable[tuple[str, int]]) -> list[tuple[LiveRequest, int]]:
        """The requests that replica runs for us; what we looked for there in vain waits for another replica."""
        looked_for = self._waiting.pop(replica_id, {})
        held: list[tuple[LiveRequest, int]] = []
        for request_id, epoch in running:
            live = looked_for.get(request_id)
            if live is not None and live.live and live.epoch == epoch:
                held.append((looked_for.pop(request_id), epoch))
        self._release(looked_for, replica_id)
        return held

    def gone(self, replica_id: str) -> None:
        self._release(self._waiting.pop(replica_id, {}), replica_id)

    def settle(self, living: set[str]) -> None:
        """All slots are in sight: replicas that are not among the living are gone."""
        for replica_id in [known for known in self._waiting if known not in living]:
            self.gone(replica_id)

    def _release(self, requests: dict[str, LiveRequest], replica_id: str) -> None:
        for live in requests.values():
            if live.live:
                logger.info("event=adopt request=%s replica=%s outcome=gone", live.request_id, replica_id)
                self._dispatcher.enter(live)


class Seating:
    def __init__(self, fleet: Fleet, dispatcher: Dispatcher, journal: Journal, alone: bool = True) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._journal = journal
        self._alone = alone
        self.adoption = Adoption(dispatcher)
        self._seats: dict[str, Seat] = {}
        self._connecting: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        dispatcher.on_seat_lost = self._seat_lost

    def seat(self, replica_id: str) -> Seat | None:
        return self._seats.get(replica_id)

    def replica_changed(self, status: ReplicaStatus) -> None:
        replica_id = status.replica_id
        finishing = status.state is ReplicaState.DRAINING and self.adoption.expects(replica_id)
        serving = status.state is ReplicaState.READY or finishing
        if serving and replica_id not in self._seats and replica_id not in self._connecting:
            self._connecting.add(replica_id)
            self._spawn(self._connect(replica_id))
        if status.state is ReplicaState.DRAINING and (seat := self._seats.get(replica_id)) is not None:
            self._dispatcher.seat_closing(seat)
        if status.state in GONE:
            self.adoption.gone(replica_id)

    def slot_changed(self) -> None:
        if self.adoption.is_waiting and self._fleet.in_sight:
            self.adoption.settle({status.replica_id for status in self._fleet.living()})

    def bring_home(self, live: LiveRequest, replica_id: str) -> None:
        """Own an adopted request that this replica ran when its owner was last heard of."""
        seat = self._seats.get(replica_id)
        status = self._fleet.replicas.get(replica_id)
        if seat is not None:
            # One that it does not know under this epoch is answered as unknown, and goes on elsewhere.
            self._dispatcher.attach(live, seat)
        elif status is not None and status.state in GONE:
            self._dispatcher.enter(live)
        else:
            self.adoption.hold(live, replica_id)
            asyncio.get_running_loop().call_later(LOOK_FOR_S, self.adoption.overdue, replica_id, live)
            if status is not None:
                self.replica_changed(status)
            self.slot_changed()

    async def _connect(self, replica_id: str) -> None:
        try:
            for pause_s in CONNECT_PAUSES_S:
                if pause_s:
                    await asyncio.sleep(pause_s)
                status = self._fleet.replicas.get(replica_id)
                if status is None or status.state in GONE or self._dispatcher.closing:
                    return
                try:
                    link = await ReplicaLink.connect(
                        status.host,
                        status.port,
                        status.token,
                        self._journal.gateway_id,
                        self._dispatcher,
                        stalled_after_s=STALLED_AFTER_S,
                    )
                except LinkError as error:
                    logger.warning("event=connect_failed replica=%s error=%s", replica_id, error)
                    continue
                self._sit(status, link)
                return
            self.adoption.gone(replica_id)
            if self._alone:
                self._fleet.end_replica(replica_id, 0.0, "unreachable")
            else:
                self._spawn(self._try_again(replica_id))
        finally:
            self._connecting.discard(replica_id)

    async def _try_again(self, replica_id: str) -> None:
        """Other gateways may reach it: its agent, which hears it or does not, decides whether it lives."""
        await asyncio.sleep(UNREACHABLE_AGAIN_S)
        status = self._fleet.replicas.get(replica_id)
        if status is not None and status.state not in GONE and not self._dispatcher.closing:
            self.replica_changed(status)

    def _sit(self, status: ReplicaStatus, link: ReplicaLink) -> None:
        welcome = link.welcome
        if welcome is None:
            raise RuntimeError("a link without a welcome")
        seat = Seat(
            replica_id=status.replica_id,
            slot_id=self._fleet.slot_of.get(status.replica_id, ""),
            key=(status.spec.tenant, status.function),
            revision=status.revision,
            identity=status.spec.identity,
            max_requests=welcome.max_requests,
            link=link,
        )
        seat.accepting = status.state is ReplicaState.READY
        self._seats[status.replica_id] = seat
        held = self.adoption.claim(status.replica_id, welcome.running)
        ours = {live.request_id for live, _ in held}
        strangers = {request_id: epoch for request_id, epoch in welcome.running if request_id not in ours}
        self._dispatcher.seat_ready(seat, held)
        if strangers:
            self._spawn(self._settle(link, strangers, last=False))

    async def _settle(self, link: ReplicaLink, strangers: dict[str, int], *, last: bool) -> None:
        """What a replica holds and nobody waits for any more (it ended or was assigned anew while nobody was connected)
        is let go of; what others own is theirs."""
        try:
            whose = await self._journal.whose(list(strangers))
        except StokerError as error:
            logger.warning("event=strangers_not_read replica=%s error=%s", link.replica_id, error)
            return
        unknown: dict[str, int] = {}
        for request_id, epoch in strangers.items():
            known = whose.get(request_id)
            if known is None and not last:
                unknown[request_id] = epoch
                continue
            live = self._dispatcher.requests.get(request_id)
            if live is not None and live.epoch == epoch:
                continue
            if known is None or known[1] > epoch or known[2].ended:
                link.cancel(request_id, epoch)
                link.settled(request_id, epoch, goes_on=known is not None and not known[2].ended)
        if unknown:
            await asyncio.sleep(UNKNOWN_AGAIN_S)
            await self._settle(link, unknown, last=True)

    def _seat_lost(self, seat: Seat, reason: str) -> None:
        if self._seats.get(seat.replica_id) is seat:
            del self._seats[seat.replica_id]
        self._spawn(self._after_loss(seat.replica_id, reason))

    async def _after_loss(self, replica_id: str, reason: str) -> None:
        if "no progress" in reason:
            self._fleet.give_up(replica_id, f"stalled: {reason}")
            return
        await asyncio.sleep(DEATH_NOTICE_S)
        status = self._fleet.replicas.get(replica_id)
        if status is not None and status.state is ReplicaState.READY and not self._dispatcher.closing:
            self.replica_changed(status)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
