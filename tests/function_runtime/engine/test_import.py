"""A template imports the engine and forks: the import may start no thread and run no tensor operation."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import os
import torch
operations = []
from torch.utils._python_dispatch import TorchDispatchMode
class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        operations.append(str(function))
        return function(*arguments, **(keywords or {}))
with Watch():
    import function_runtime.engine.engine
    import function_runtime.engine.attention.torch_attention
print(len(os.listdir("/proc/self/task")), operations, "triton" in __import__("sys").modules)
"""


def test_importing_the_engine_starts_no_thread_and_computes_nothing() -> None:
    import os

    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    assert done.stdout.split("\n")[0] == "1 [] False", done.stdout
