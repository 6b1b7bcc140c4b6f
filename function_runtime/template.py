"""The process workers are forked from: it has imported everything, and run nothing.

    python -m function_runtime.template --control-fd N --agent-pid P --slot-dir D

Single-threaded, no tensor operation, no device touched, so that a fork is whole; its heap is frozen, so that forks
share it. A worker is forked twice over and so becomes the agent's own child: the kernel kills it when the agent dies,
and not when the template does. Limits: Linux; dies with the agent.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time

# Before numpy: its BLAS would start threads at import. The engine sets its own thread count in the worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Before torch: OpenMP threads that spin at barriers take the CPU from the thread they wait for as soon as anything else
# runs beside the engine (seen on 2 cores with a load of 5: 420 ms a token spinning, 80 ms sleeping).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from function_runtime import process, worker
from function_runtime.wire import Fork, Forked, Imported, datagram, fork_words


def import_stores() -> None:
    """What a replica opens its object store with, which it does between being ready and its first token: 50 ms for one
    that is served over HTTP, and 250 for S3, which is imported where there are credentials for it."""
    for module in ("encodings.idna", "model_loader.objects.http"):
        importlib.import_module(module)
    if any(name.startswith("AWS_") for name in os.environ):
        with contextlib.suppress(ImportError):
            importlib.import_module("model_loader.objects.s3")


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

    import_stores()
    # Not collected first: that takes a fifth of a second of a start, and the few cycles of the imports stay for good.
    gc.freeze()
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(f"the template has {threads} threads after its imports: it cannot be forked safely")
    control = socket.socket(fileno=arguments.control_fd)
    control.send(datagram(Imported(import_us=(time.monotonic_ns() - began_ns) // 1000)))
    builder = NativeBuilder()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        except ConnectionError:
            message, descriptors = b"", []
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
        middle_pid = os.getpid()
        if os.fork() != 0:
            os._exit(0)
        control.close()
        _become_worker(descriptors[0], middle_pid, agent_pid, builder, wait=fork.wait)
    os.waitpid(middle, 0)
    for descriptor in descriptors:
        os.close(descriptor)
    control.send(datagram(Forked()))


def _become_worker(
    descriptor: int, middle_pid: int, agent_pid: int, builder: worker.EngineBuilder, *, wait: bool
) -> None:
    # The bond to the agent holds only once the agent is the parent, which it is when the middle process has ended.
    while (parent_pid := os.getppid()) == middle_pid:
        time.sleep(0.0001)
    if parent_pid != agent_pid or not process.die_with_parent(agent_pid):
        os._exit(worker.EXIT_AGENT_GONE)
    process.set_name("stoker-worker")
    worker.run(socket.socket(fileno=descriptor), builder, wait=wait)


if __name__ == "__main__":
    main()
