"""The process workers are forked from: it has imported everything, and run nothing.

    python -m function_runtime.template --control-fd N --agent-pid P --slot-dir D

Single-threaded, no tensor operation, no device touched, so that a fork is whole; its heap is frozen, so that forks
share it. A worker is forked twice over and so becomes the agent's own child: the kernel kills it when the agent dies,
and not when the template does. Limits: Linux; dies with the agent.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import sys
import time
from typing import Final

# Before numpy: its BLAS would start threads at import. The engine sets its own thread count in the worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from function_runtime import process, worker
from function_runtime.wire import Fork, Forked, Imported, datagram, fork_words

_ADOPTED_WITHIN_S: Final = 5.0


def main() -> None:
    began_ns = time.monotonic_ns()
    parser = argparse.ArgumentParser(prog="function_runtime.template")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--agent-pid", type=int, required=True)
    parser.add_argument("--slot-dir", required=True)
    arguments = parser.parse_args()
    if not process.die_with_parent(arguments.agent_pid):
        os._exit(worker.EXIT_AGENT_GONE)
    process.set_name("stoker-template")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    from function_runtime.native import NativeBuilder

    gc.enable()
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(f"the template has {threads} threads after its imports: it cannot be forked safely")
    control = socket.socket(fileno=arguments.control_fd)
    control.send(datagram(Imported(import_us=(time.monotonic_ns() - began_ns) // 1000)))
    builder = NativeBuilder()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not message:
            os._exit(worker.EXIT_AGENT_GONE)
        _fork_worker(message, descriptors, control, arguments.agent_pid, builder)


def _fork_worker(
    message: bytes, descriptors: list[int], control: socket.socket, agent_pid: int, builder: worker.EngineBuilder
) -> None:
    fork: Fork = fork_words.decode(message)
    middle = os.fork()
    if middle == 0:
        template_pid = os.getppid()
        process.die_with_parent(template_pid)
        if os.fork() != 0:
            os._exit(0)
        control.close()
        _become_worker(descriptors[0], agent_pid, builder, wait=fork.wait)
    os.waitpid(middle, 0)
    for descriptor in descriptors:
        os.close(descriptor)
    control.send(datagram(Forked()))


def _become_worker(descriptor: int, agent_pid: int, builder: worker.EngineBuilder, *, wait: bool) -> None:
    # The bond to the agent holds only once the agent is the parent, which it is when the middle process has ended.
    deadline_ns = time.monotonic_ns() + int(_ADOPTED_WITHIN_S * 1e9)
    while os.getppid() != agent_pid:
        if time.monotonic_ns() > deadline_ns:
            os._exit(worker.EXIT_AGENT_GONE)
        time.sleep(0.0001)
    if not process.die_with_parent(agent_pid):
        os._exit(worker.EXIT_AGENT_GONE)
    process.set_name("stoker-worker")
    worker.run(socket.socket(fileno=descriptor), builder, wait=wait)


if __name__ == "__main__":
    main()
