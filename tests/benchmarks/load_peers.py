"""Other loaders of safetensors, run with the interpreter that has them: seconds of every load as one JSON line.

    load_peers.py WAY ROUNDS reused|fresh PATH...        WAY: safetensors, runai, fastsafetensors

"Reused": tensors are copied into memory that an earlier round used; "fresh": each round ends with tensors of its own.
Only safetensors can do with that memory alone: the other two read into new buffers of their own each time, and in the
reused case copy once more. Imports are not counted; the first round of reused memory is left out. Nothing is verified.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator

import torch


def safetensors(paths: list[str], kept: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for path in paths:
            yield from load_file(path).items()

    return keep(tensors(), kept, own=True)


def runai(paths: list[str], kept: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths, owned=kept is None)
        return keep(streamer.get_tensors(), kept, own=False)


def fastsafetensors(paths: list[str], kept: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    try:
        loader.add_filenames({0: paths})
        buffers = loader.copy_files_to_device()
        try:
            names = list(buffers.key_to_rank_lidx)
            return keep(((name, buffers.get_tensor(name)) for name in names), kept, own=True)
        finally:
            buffers.close()
    finally:
        loader.close()


def keep(
    found: Iterator[tuple[str, torch.Tensor]], kept: dict[str, torch.Tensor] | None, *, own: bool
) -> dict[str, torch.Tensor]:
    """Into `kept`, or as tensors of their own; `own`: they have to be copied for that."""
    result = {} if kept is None else kept
    for name, tensor in found:
        if kept is not None and name in kept:
            kept[name].copy_(tensor)
        else:
            result[name] = tensor.clone() if own or kept is not None else tensor
    return result


def main() -> None:
    way, rounds, memory, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "ERROR")
    load = {"safetensors": safetensors, "runai": runai, "fastsafetensors": fastsafetensors}[way]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    seconds: list[float] = []
    kept: dict[str, torch.Tensor] | None = {} if memory == "reused" else None
    for number in range(rounds + (memory == "reused")):
        begin = time.perf_counter()
        result = load(paths, kept)
        took = time.perf_counter() - begin
        if memory == "fresh":
            nbytes = sum(t.numel() * t.element_size() for t in result.values())
            del result
        else:
            kept = result
            nbytes = sum(t.numel() * t.element_size() for t in kept.values())
        if memory == "fresh" or number:
            seconds.append(took)
    print(json.dumps({"seconds": seconds, "nbytes": nbytes}))


if __name__ == "__main__":
    main()
