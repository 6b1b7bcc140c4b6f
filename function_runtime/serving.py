"""A replica's loop: one thread that reads gateways and the agent, runs engine steps, and reports its own progress.

    wait (only without work) -> messages -> one engine step -> tokens out -> KV out -> heartbeat

No other thread touches the engine; helpers (KV reads and writes) hand their results over through an `Inbox`.
A lost gateway connection stops nothing; the agent's end of its socket closing stops everything.
Limits: a step is not interrupted: a cancellation, a drain, another share of memory wait for the step under way.
"""

from __future__ import annotations

import hmac
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Final

import msgspec

from function_runtime.agent_channel import AgentChannel, AgentGone
from function_runtime.beats import Beats, progress_of
from function_runtime.clock import LifeClock, Stopwatch
from function_runtime.engine_like import DoubtLike, EngineLike, SealedRangeLike, kv_bytes_of
from function_runtime.errors import EngineFault
from function_runtime.gateway_link import GatewayLink
from function_runtime.gateway_links import GatewayLinks
from function_runtime.held import HeldRequest, HeldRequests
from function_runtime.inbox import Inbox
from function_runtime.kv_room import KvRoom
from function_runtime.kv_service import KvRead, KvService
from function_runtime.parking import Parking
from function_runtime.protocol import (
    PROTOCOL_VERSION,
    STALLED_AFTER_S,
    Accepted,
    Attach,
    Attached,
    Cancel,
    GatewayMessage,
    Hello,
    KvBad,
    KvKnown,
    KvSealed,
    Park,
    Progress,
    ReplicaSpec,
    Settled,
    StoreTotals,
    Submit,
    Unknown,
    Welcome,
    Work,
    speaks,
)
from function_runtime.wire import AgentWord, Drain, Ping, Report, ResizeKv, StoreToken
from model_loader.objects.location import TOKEN_VARIABLE

FLUSH_WITHIN_S: Final = 5.0
"""How long an ending replica may spend on storing the KV of what it could not finish, and parking on storing that of
what it puts away."""
STOOD_STILL_NS: Final = int((STALLED_AFTER_S - 2.0) * 1e9)
"""A loop that finds itself this late was stopped. Its gateways may have given it up already (after `STALLED_AFTER_S`,
counted from a heartbeat that may be a step older than the loop's last turn), so it gives its requests up too."""


class Serving:
    def __init__(
        self,
        *,
        spec: ReplicaSpec,
        token: str,
        engine: EngineLike,
        listener: socket.socket,
        agent: AgentChannel,
        clock: LifeClock,
        inbox: Inbox,
        kv: KvService | None,
    ) -> None:
        self._spec = spec
        self._token = token.encode()
        self._engine = engine
        self._listener = listener
        self._agent = agent
        self._clock = clock
        self._inbox = inbox
        self._kv = kv
        self._held = HeldRequests()
        self._selector = selectors.DefaultSelector()
        self._links = GatewayLinks(self._selector, self._held.detach)
        self._steps = 0
        self._lease_ns = 0
        self._last_ping_ns = time.monotonic_ns()
        self._beats = Beats()
        self._drain: Drain | None = None
        self._drain_until_ns = 0
        self._room = KvRoom()
        self._parking = Parking(inbox, kv, FLUSH_WITHIN_S)
        self._turn_ns = time.monotonic_ns()
        self.stages = Stopwatch()
        engine.while_waiting(self._go_on_beating)

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Returns when drained. Raises `AgentGone`, or whatever broke the engine after failing its requests."""
        self._listener.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._inbox.post(lambda: self._obey(Drain(0.0, "SIGTERM"))))
        self._turn_ns = time.monotonic_ns()
        for item in (self._listener, self._agent.socket, self._inbox):
            self._selector.register(item, selectors.EVENT_READ, item)
        while not self._may_end():
            self._wait()
            if self._room.settle(self._engine, self._turn_ns):
                self._beats.at_once()
            if self._engine.has_work:
                self._step()
            self._beat()
        self._end()

    def _wait(self) -> None:
        idle = not self._held.any_live
        begin_ns = time.monotonic_ns()
        if self._engine.has_work:
            timeout_s = 0.0
        else:
            timeout_s = max(0.0, (self._beats.next_ns - begin_ns) / 1e9)
            if self._drain is not None:
                timeout_s = min(timeout_s, max(0.0, (self._drain_until_ns - begin_ns) / 1e9))
        ready = self._selector.select(timeout_s)
        self._turn()
        if idle:
            self._clock.add_idle(time.monotonic_ns() - begin_ns)
        for key, mask in ready:
            source = key.data
            if isinstance(source, GatewayLink):
                if mask & selectors.EVENT_WRITE:
                    source.flush()
                if mask & selectors.EVENT_READ:
                    self._hear(source)
            elif source is self._listener:
                self._links.accept(self._listener)
            elif source is self._inbox:
                self._inbox.run_all()
            else:
                for word in self._agent.receive():
                    self._obey(word)
        self._links.tend()

    @property
    def is_awake(self) -> bool:
        """Whether the loop turns; False in a process that was stopped and has not looked at the clock yet. For helpers
        about to change what others may own by now."""
        return time.monotonic_ns() - self._turn_ns < STOOD_STILL_NS

    def _turn(self) -> None:
        """To be called before anything that came meanwhile is looked at."""
        now_ns = time.monotonic_ns()
        late_ns = now_ns - self._turn_ns
        if late_ns >= STOOD_STILL_NS:
            print(f"the loop stood still for {late_ns / 1e9:.1f} s: every request is given up", file=sys.stderr)
            for held in self._held.live:
                if held.in_engine:
                    self._engine.cancel(held.id)
                held.fail(now_ns, "stalled", f"this replica stood still for {late_ns / 1e9:.1f} s", retry=True)
                if self._kv is not None:
                    self._kv.hand_over(held)
        self._turn_ns = now_ns

    def _step(self) -> None:
        try:
            step = self._engine.step()
        except Exception as error:
            now_ns, why = time.monotonic_ns(), EngineFault.of(error)
            for held in self._held.live:
                held.fail(now_ns, why.code, why.message, retry=why.retry)
            self._links.linger()
            raise
        self._steps += 1
        for request_id, (prefill_us, decode_us) in step.device_us.items():
            if user := self._held.get(request_id):
                user.prefill_us += prefill_us
                user.decode_us += decode_us
                self._clock.attribute(prefill_us + decode_us)
        for admission in step.admitted:
            if taken := self._living(admission.request_id, admission.epoch):
                taken.admit(
                    Accepted(
                        request_id=taken.id,
                        epoch=taken.epoch,
                        loaded_tokens=admission.loaded_tokens,
                        recomputed_tokens=admission.recomputed_tokens,
                        exact=admission.exact,
                        load_us=admission.load_us,
                        detail=admission.detail,
                        load_bytes=admission.load_bytes,
                    )
                )
        for doubt in step.doubts:
            self._tell_doubt(doubt)
        for tokens in step.tokens:
            if producer := self._living(tokens.request_id, tokens.epoch):
                producer.produce(tokens)
        if self._kv is not None:
            for sealed in step.sealed:
                owner = self._living(sealed.request_id, sealed.epoch)
                if owner is not None and owner.work.write_kv:
                    self._store(self._kv, owner, sealed)
        now_ns = time.monotonic_ns()
        for end in step.finished:
            if ended := self._living(end.request_id, end.epoch):
                if self._kv is not None:
                    self._kv.finished(ended)
                ended.finish(now_ns, cancelled=end.cancelled)
                self._places_moved()
        for request_id, epoch, fault in step.failed:
            if failed := self._living(request_id, epoch):
                failed.fail(now_ns, fault.code, fault.message, retry=fault.retry)

    def _tell_doubt(self, doubt: DoubtLike) -> None:
        """Its request may be over: whoever is connected hears it."""
        print(f"kv doubt request={doubt.request_id} pack={doubt.chunk.pack} {doubt.reason}", file=sys.stderr)
        message = KvBad(request_id=doubt.request_id, epoch=doubt.epoch, chunk=doubt.chunk, reason=doubt.reason)
        for link in self._links:
            if link.welcome:
                link.send(message)
        if self._kv is not None:
            self._kv.distrust(doubt.chunk)

    def _living(self, request_id: str, epoch: int) -> HeldRequest | None:
        held = self._held.get(request_id)
        return held if held is not None and held.epoch == epoch and held.in_engine else None

    def _go_on_beating(self) -> None:
        """In the middle of a step, between its layers or where it waits for weights or stored KV. A layer is progress,
        bytes that come are, and the wait ends by itself where none do. Nothing here may touch the engine."""
        if self.is_awake:
            self._turn_ns = time.monotonic_ns()
        if select.select([self._agent.socket], [], [], 0)[0]:
            for word in self._agent.receive():
                self._obey(word)
        self._beat()

    def _beat(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._beats.next_ns:
            return
        if self._lease_ns and now_ns - self._last_ping_ns > self._lease_ns:
            raise AgentGone
        stats, life = self._engine.stats, self._clock.read()
        if self._beats.begin(now_ns, self._held.any_live):
            progress = progress_of(self._steps, stats, life)
            for link in self._links:
                if link.welcome:
                    link.send(self._progress_for(link, progress))
        totals = self._kv.store_totals() if self._kv is not None else StoreTotals()
        kv_bytes = kv_bytes_of(self._engine.kv_layout, stats)
        self._agent.mention(Report(life, stats.running, stats.waiting, totals, kv_bytes))
        for held in self._held.expired(now_ns):
            self._settle(held, goes_on=True)  # nobody has said that it is over

    def _places_moved(self) -> None:
        """Where several gateways share the places, each hears at once what the others took or left."""
        if len(self._links) > 1:
            self._beats.at_once()

    def _progress_for(self, link: GatewayLink, progress: Progress) -> Progress:
        """What one gateway is told: how many places the others take, so that they do not sell one twice."""
        others = self._held.live_of_others(link)
        return msgspec.structs.replace(progress, others=others) if others else progress

    # --- gateways -------------------------------------------------------------------------------------------------

    def _hear(self, link: GatewayLink) -> None:
        for message in link.receive():
            if link.welcome:
                self._answer(link, message)
            elif isinstance(message, Hello) and self._greet(link, message):
                continue
            else:
                link.closed = True
                return

    def _greet(self, link: GatewayLink, hello: Hello) -> bool:
        if not hmac.compare_digest(hello.token.encode(), self._token):
            return False
        if not speaks(hello.version):
            return False
        link.welcome, link.gateway = True, hello.gateway
        link.send(
            Welcome(
                replica_id=self._spec.replica_id,
                function=self._spec.function,
                revision=self._spec.revision,
                identity=self._spec.identity,
                max_requests=self._spec.options.max_requests,
                max_context_tokens=self._engine.max_context_tokens,
                running=self._held.listing(),
                version=PROTOCOL_VERSION,
            )
        )
        return True

    def _answer(self, link: GatewayLink, message: GatewayMessage) -> None:
        match message:
            case Submit(work=work):
                self._submit(link, work)
            case Attach():
                self._attach(link, message)
            case Cancel(request_id=request_id, epoch=epoch):
                held = self._held.get(request_id)
                if held is None or held.epoch != epoch or held.is_of_another(link):
                    link.send(Unknown(request_id=request_id, epoch=epoch))
                elif held.outcome is not None:
                    link.send(held.outcome)
                else:
                    self._cancel(held)
            case Park(request_id=request_id, epoch=epoch, reason=reason):
                held = self._held.get(request_id)
                if held is None or held.epoch != epoch or held.is_of_another(link):
                    link.send(Unknown(request_id=request_id, epoch=epoch))
                elif held.outcome is not None:
                    link.send(held.outcome)
                elif not held.parking:
                    self._take_out(held)
                    self._parking.put_away(held, reason or "asked to")
            case Settled(request_id=request_id, epoch=epoch, goes_on=goes_on):
                held = self._held.get(request_id)
                if held is not None and held.epoch == epoch and not held.is_of_another(link):
                    if held.live:
                        self._cancel(held)
                    self._settle(held, goes_on=goes_on)
            case KvKnown() if self._kv is not None:
                self._kv.hear(message)
            case Hello():
                link.closed = True

    def _submit(self, link: GatewayLink, work: Work) -> None:
        known = self._held.get(work.request_id)
        if known is not None and known.epoch == work.epoch:
            # The same attempt again (its first answer was lost with a connection): it goes on, told anew.
            known.link = link
            for message in known.replay(len(work.produced)):
                link.send(message)
            return
        if known is not None:
            if known.epoch > work.epoch:
                link.send(Unknown(request_id=work.request_id, epoch=work.epoch))
                return
            if known.live:
                self._cancel(known)
            self._settle(known, goes_on=True)
        held = HeldRequest(work, link)
        self._held.add(held)
        self._beats.soon(time.monotonic_ns())
        self._places_moved()
        if self._drain is not None:
            held.parking = f"this replica is ending: {self._drain.reason}"
            held.park(time.monotonic_ns())
        elif self._kv is not None and work.kv:
            self._kv.begin_read(held)
        elif self._kv is not None and self._kv.may_continue(held, self._engine.cached_prefix(work)):
            self._kv.begin_ask(held)
        else:
            self._admit(held, None)

    def kv_read(self, held: HeldRequest, result: KvRead) -> None:
        """The store's answer, on the loop's thread. Too late or no longer wanted: dropped."""
        if held.live and not held.in_engine and not held.parking and self._held.get(held.id) is held:
            self._admit(held, result)

    def kv_sealed(self, held: HeldRequest, message: KvSealed) -> None:
        held.seal(message)

    def _admit(self, held: HeldRequest, read: KvRead | None) -> None:
        restored = read.restored if read is not None else None
        try:
            admission = self._engine.submit(held.work, restored)
        except EngineFault as fault:
            held.fail(time.monotonic_ns(), fault.code, fault.message, retry=fault.retry)
            return
        except Exception as error:
            # One request that the engine trips over is no reason to end the others; it would trip again elsewhere.
            traceback.print_exc()
            held.fail(time.monotonic_ns(), "engine_failed", f"the engine failed to take it: {error}", retry=False)
            return
        if admission.pending:
            # What came of its stored KV is said when it is known, before its first token.
            held.in_engine = True
            return
        held.admit(
            Accepted(
                request_id=held.id,
                epoch=held.epoch,
                loaded_tokens=admission.loaded_tokens,
                recomputed_tokens=admission.recomputed_tokens,
                exact=admission.exact,
                load_us=read.duration_us if read is not None else 0,
                detail="; ".join(filter(None, (read.detail if read is not None else "", admission.detail))),
            )
        )

    def _attach(self, link: GatewayLink, attach: Attach) -> None:
        held = self._held.get(attach.request_id)
        if held is None or held.epoch != attach.epoch:
            link.send(Unknown(request_id=attach.request_id, epoch=attach.epoch))
            return
        held.link = link
        self._places_moved()
        link.send(Attached(request_id=held.id, epoch=held.epoch))
        for message in held.replay(attach.after_seq):
            link.send(message)

    def _cancel(self, held: HeldRequest) -> None:
        if held.in_engine:
            self._engine.cancel(held.id)
        held.finish(time.monotonic_ns(), cancelled=True)

    def _settle(self, held: HeldRequest, *, goes_on: bool) -> None:
        self._held.forget(held.id)
        if self._kv is None:
            return
        if goes_on or held.goes_on:
            self._kv.hand_over(held)
        else:
            self._kv.release(held)

    # --- the agent, and the end -----------------------------------------------------------------------------------

    def _obey(self, word: AgentWord) -> None:
        match word:
            case Ping(lease_s=lease_s):
                self._lease_ns = int(lease_s * 1e9)
                self._last_ping_ns = time.monotonic_ns()
            case StoreToken(token=token):
                os.environ[TOKEN_VARIABLE] = token
            case ResizeKv(kv_bytes=kv_bytes):
                self._room.tell(kv_bytes)
            case Drain(grace_s=grace_s):
                self._drain_until_ns = time.monotonic_ns() + int(grace_s * 1e9)
                if self._drain is None:
                    self._drain_start = self.stages.run("drain")
                    self._drain_start.__enter__()
                self._drain = word
            case _:
                print(f"unexpected word from the agent: {type(word).__name__}", file=sys.stderr)

    def _may_end(self) -> bool:
        """Draining, and nothing is left to do: no live request, and every outcome settled (or nobody to settle it)."""
        if self._drain is None:
            return False
        if time.monotonic_ns() >= self._drain_until_ns:
            return True
        if self._held.any_live:
            return False
        return not any(held.link is not None for held in self._held)

    def _end(self) -> None:
        self._drain_start.__exit__()
        with self.stages.run("flush") as flush:
            unfinished = self._held.live
            for held in unfinished:
                self._take_out(held)
            if self._kv is not None and unfinished:
                self._kv.flush(FLUSH_WITHIN_S)
                self._inbox.run_all()
            flush.detail = f"{len(unfinished)} unfinished"
            now_ns = time.monotonic_ns()
            reason = self._drain.reason if self._drain is not None else ""
            for held in unfinished:
                if held.live:
                    held.parking = held.parking or f"this replica ended first: {reason}"
                    held.park(now_ns)
            self._links.linger()

    def _take_out(self, held: HeldRequest) -> None:
        """Out of the engine between two steps; the KV that no chunk covers yet is queued to be stored."""
        if not held.in_engine:
            return
        if self._kv is not None and held.work.write_kv:
            for tail in self._engine.kv_tail(held.id):
                self._store(self._kv, held, tail)
        self._engine.cancel(held.id)
        held.in_engine = False

    def _store(self, kv: KvService, held: HeldRequest, sealed: SealedRangeLike) -> None:
        """Best effort: without its KV a request is computed again."""
        choice, start, end = sealed.choice, sealed.start, sealed.end
        try:
            if kv.has_already(held, sealed):
                return
            kv.write(held, sealed, self._engine.export_kv(held.id, choice, start, end))
        except Exception as error:
            print(f"kv not written request={held.id} choice={choice} [{start}, {end}): {error!r}", file=sys.stderr)
