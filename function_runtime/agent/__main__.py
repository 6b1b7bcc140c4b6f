"""`python -m function_runtime.agent`: the slot's agent as a process of its own.

Holds `agent.lock`, writes `agent.json` when it listens and removes it at a clean end. Exit codes: 0 ended as asked or
orphaned, 2 another agent holds the slot, or an option cannot be. By default it listens on the loopback address and
makes a token that `agent.json` tells; with `--listen` and the hashes of two tokens it is a slot on another machine that
holds no secret. SIGTERM makes the slot terminate: its state says so, nothing new is taken, what runs finishes or is
parked within `--term-grace-s`, and then it exits.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from function_runtime import process
from function_runtime.agent.access import Access
from function_runtime.agent.address import Address
from function_runtime.agent.events import log
from function_runtime.agent.pool import Pool, Tiers
from function_runtime.agent.server import AgentServer
from function_runtime.agent.slot import Slot
from function_runtime.agent.watch import Watch
from function_runtime.printing import forgive
from function_runtime.protocol import AgentInfo

TERM_GRACE_S: Final = 10.0
ORPHAN_GRACE_S: Final = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="function_runtime.agent", description=__doc__)
    parser.add_argument("--slot-dir", type=Path, required=True)
    parser.add_argument("--slot-id", required=True)
    parser.add_argument("--pool-dir", type=Path, required=True)
    parser.add_argument("--pool-bytes", type=int, default=0, help="0: half of the pool directory's file system")
    parser.add_argument("--disk-bytes", type=int, default=0, help="budget of the disk tier below the pool; 0: none")
    parser.add_argument("--form-store", default="", help="object store where forms that take long to make are kept")
    parser.add_argument("--warm", type=int, default=0, help="forked workers kept waiting")
    parser.add_argument("--orphan-s", type=float, default=120.0, help="end when nobody reads the events this long")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="where commands are taken")
    parser.add_argument("--advertise", default="", metavar="HOST", help="how others reach --listen; needed for 0.0.0.0")
    parser.add_argument("--replica-ports", default="", metavar="A-B", help="ports of replicas; none: any that is free")
    parser.add_argument("--token-hash", default="", help="SHA-256 of the token that commands; none: one is made")
    parser.add_argument("--peer-token-hash", default="", help="SHA-256 of the token that reads the pool")
    parser.add_argument("--term-grace-s", type=float, default=TERM_GRACE_S, help="what replicas get after a SIGTERM")
    arguments = parser.parse_args()
    try:
        address = Address.parse(arguments.listen, arguments.advertise, arguments.replica_ports)
        hashes = (arguments.token_hash, arguments.peer_token_hash)
        access = Access.parse(*hashes) if any(hashes) else None
    except ValueError as error:
        parser.error(str(error))
    directory: Path = arguments.slot_dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
        print(f"the slot {directory} already has an agent, pid {holder}", file=sys.stderr)
        sys.exit(2)
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    process.set_name("stoker-agent")
    try:
        listener = address.bind()
    except OSError as error:
        print(f"cannot listen on {arguments.listen}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    forgive()
    asyncio.run(_run(arguments, directory, address, listener, access))


async def _run(
    arguments: argparse.Namespace, directory: Path, address: Address, listener: socket.socket, access: Access | None
) -> None:
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    disk = directory / "chunks" if arguments.disk_bytes else None
    tiers = Tiers(disk, arguments.disk_bytes, arguments.form_store)
    slot = Slot(
        slot_id=arguments.slot_id,
        directory=directory,
        warm=arguments.warm,
        open_pool=lambda children, changed: Pool(arguments.pool_dir, arguments.pool_bytes, children, changed, tiers),
        address=address,
    )
    watch = Watch(slot, arguments.orphan_s)
    token = "" if access is not None else secrets.token_urlsafe(32)
    server = AgentServer(slot, watch, access or Access.of_token(token))
    await slot.open()
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    port = listener.getsockname()[1]
    info = AgentInfo(
        slot_id=slot.slot_id,
        pid=os.getpid(),
        host=address.advertised,
        port=port,
        token=token,
        incarnation=slot.incarnation,
    )
    info_path = directory / "agent.json"
    _write_private(info_path, msgspec.json.encode(info))
    log(f"agent pid={os.getpid()} slot={slot.slot_id} address={address.advertised}:{port} warm={arguments.warm}")
    watching = asyncio.create_task(watch.run())
    wishes = {
        asyncio.create_task(terminated.wait(), name="SIGTERM"): arguments.term_grace_s,
        asyncio.create_task(watch.orphaned.wait(), name="nobody reads its events"): ORPHAN_GRACE_S,
        asyncio.create_task(_wait(server.shutdown_wanted), name="asked to shut down"): 0.0,
        watching: 0.0,
    }
    try:
        done, _ = await asyncio.wait(wishes, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop()
        grace_s = server.shutdown_wanted.result() if server.shutdown_wanted.done() else wishes[first]
        reason = "the watch failed" if first is watching else first.get_name()
        log(f"agent ends: {reason}, grace={grace_s:g} s")
        await slot.close(grace_s, f"the agent ends: {reason}")
        info_path.unlink(missing_ok=True)
        await runner.cleanup()
        if first is watching:
            await watching
    finally:
        slot.children.kill_all()
        for task in wishes:
            task.cancel()


async def _wait(future: asyncio.Future[float]) -> None:
    await asyncio.shield(future)


def _write_private(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
