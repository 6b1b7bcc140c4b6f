"""Runs a module as the main program of a process whose life the kernel binds to its parent's.

    python -m function_runtime.bound PARENT_PID MODULE [ARGUMENT ...]
"""

from __future__ import annotations

import os
import runpy
import sys

from function_runtime import process


def main() -> None:
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    if not process.die_with_parent(parent_pid):
        os._exit(3)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
