"""Weights onto a GPU: host-to-device rate against the link's limit, the first token while they arrive, and twenty times
from zero to one and back, the device's memory looked at each time.

`python -m tests.benchmarks.gpu_load` (under five minutes; where there is no GPU it says so and exits 0). The model is
random, bfloat16, 2 GB. Limits: one device, cuda:0; memory by `nvidia-smi`, which counts every process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from tests.benchmarks import report

GIGABYTES: Final = 2.0
TIMES: Final = 20
RATE_SHARE: Final = 0.8
TOKEN_SHARE: Final = 0.85
TOLERANCE_BYTES: Final = 16 << 20
WAIT_S: Final = 60.0


def link_limit(device: Any) -> float:
    """Bytes per second of large copies out of pinned memory: what this link gives at best."""
    import torch

    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return float((1 << 30) / report.median(seconds))


def staged_rate(form: Path, device: Any) -> tuple[float, float]:
    """(bytes per second, largest difference) of a form that is complete, through the ring; then compared."""
    import torch

    from function_runtime.engine.staging import CudaDevice, Staging
    from model_loader.prepared import PreparedFile

    seconds, worst = [], 0.0
    for _ in range(3):
        file = PreparedFile.open(form, verify=False)
        file.populate()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        staging = Staging(file, CudaDevice(device))
        for group in range(len(file.groups)):
            staging.wait(group)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        for name in file.keys():  # noqa: SIM118
            there = torch.from_numpy(file.tensor(name).copy()).view(torch.bfloat16)
            worst = max(worst, float((staging.tensors[name].cpu().float() - there.float()).abs().max()))
        del staging
        torch.cuda.empty_cache()
    return form.stat().st_size / report.median(seconds), worst


def token_s(manifest: Any, form: Any, device: str) -> float:
    """From a form, complete or arriving, to one token after a prompt."""
    import torch

    from function_runtime.engine.engine import Engine
    from function_runtime.protocol import EngineOptions, Sampling, Work
    from model_loader.tokenizer import Tokenizer

    begin = time.perf_counter()
    options = EngineOptions(device=device, dtype="bfloat16", kv_bytes=256 << 20, step_tokens=512, prefix_cache=False)
    tokenizer = Tokenizer.load(manifest.directory)
    engine = Engine.load(form, manifest.config, tokenizer, manifest.eos_token_ids, options)
    prompt = tuple(10 + number % 400 for number in range(512))
    engine.submit(Work("r", 1, "t", "t", prompt, Sampling(max_tokens=1, temperature=0.0), write_kv=False))
    while engine.has_work:
        if engine.step().tokens:
            break
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    del engine
    torch.cuda.empty_cache()
    return seconds


def first_token(manifest: Any, folder: Path, device: str) -> dict[str, float]:
    """While the form is made out of the page cache, beside making it first."""
    from model_loader.prepared import PreparedFile
    from model_loader.progress import Progress
    from model_loader.recipe import prepare

    warm = folder / "warm.prepared"
    prepare(manifest, "bfloat16", warm)
    token_s(manifest, PreparedFile.open(warm, verify=False), device)  # kernels compiled, context made
    begin = time.perf_counter()
    prepare(manifest, "bfloat16", folder / "first.prepared")
    token_s(manifest, PreparedFile.open(folder / "first.prepared", verify=False), device)
    in_turn_s = time.perf_counter() - begin
    forms: list[Any] = []
    mappable = threading.Event()

    def hear(progress: Progress) -> None:
        if progress.stage == "arriving":
            forms.append(PreparedFile.open_arriving(Path(progress.path)))
            mappable.set()

    begin = time.perf_counter()
    loading = threading.Thread(target=lambda: prepare(manifest, "bfloat16", folder / "second.prepared", hear))
    loading.start()
    mappable.wait(WAIT_S)
    token_s(manifest, forms[0], device)
    together_s = time.perf_counter() - begin
    loading.join()
    return {"in_turn_s": in_turn_s, "together_s": together_s, "share": together_s / in_turn_s}


def device_bytes() -> int:
    """Of cuda:0, by the driver: every process's."""
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return int(told.stdout.split()[0]) << 20


def zero_to_one(model: Path, folder: Path) -> dict[str, Any]:
    """Through the whole service, twenty times; nothing in this process may hold the device by now."""
    from tests.support.service import Service

    stages: dict[str, list[float]] = {}
    left: list[int] = []
    totals: list[float] = []
    with Service(folder / "service") as service:
        options = {"device": "cuda:0", "dtype": "bfloat16", "kv_bytes": 256 << 20}
        service.deploy("gpu", f"file://{model}", scaling={"keep_alive": 0.2}, engine_options=options)
        service.wait_imported("gpu")
        baseline = device_bytes()
        for _ in range(TIMES):
            service.wait_zero()
            service.wait_warm()
            begin = time.perf_counter()
            service.call("POST", "/v1/completions", {"model": "gpu", "prompt": "a", "max_tokens": 1})
            totals.append(time.perf_counter() - begin)
            service.wait_zero()
            deadline = time.monotonic() + WAIT_S
            while device_bytes() > baseline + TOLERANCE_BYTES and time.monotonic() < deadline:
                time.sleep(0.05)
            left.append(device_bytes() - baseline)
            newest = max(service.replicas(live=False), key=lambda row: row["created_us"])
            for stage in newest["stages"]:
                stages.setdefault(stage["name"], []).append(stage["duration_us"] / 1e6)
    return {
        "stages_s": {name: report.median(values) for name, values in stages.items()},
        "first_answer_s": report.median(totals),
        "left_bytes": left,
    }


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        report.console.print("there is no GPU here: nothing was measured")
        return 0
    from model_loader.importer import import_model
    from model_loader.recipe import prepare
    from tests.benchmarks.load_files import random_model

    holds: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="stoker-gpu-") as name, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        folder, pool = Path(name), Path(shm)
        model = random_model(folder, GIGABYTES, 1)
        service = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.gpu_load", "--service", str(model), str(folder)],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        report.console.print(service.stdout + service.stderr[-2000:])
        holds.append(service.returncode == 0)
        manifest = import_model(f"file://{model}", folder / "models")
        device = torch.device("cuda:0")
        limit = link_limit(device)
        prepare(manifest, "bfloat16", pool / "form.prepared")
        rate, worst = staged_rate(pool / "form.prepared", device)
        token = first_token(manifest, pool, "cuda:0")
        report.save("gpu_load", {"link_bytes_s": limit, "staged_bytes_s": rate, "worst": worst, "first_token": token})
        report.table(
            "Weights onto the device",
            ["what", "value"],
            [["link GB/s", limit / 1e9], ["staged GB/s", rate / 1e9], *([k, v] for k, v in token.items())],
        )
        holds += [
            report.verdict("what is on the device is what is in the form", worst == 0.0, f"{worst}"),
            report.verdict(f"staged at {RATE_SHARE:.0%} of the link or more", rate >= RATE_SHARE * limit,
                           f"{rate / limit:.2f}"),
            report.verdict(f"first token while loading: at most {TOKEN_SHARE} of one after the other",
                           token["share"] <= TOKEN_SHARE, f"{token['share']:.2f}"),
        ]  # fmt: skip
    return 0 if all(holds) else 1


def service_main(model: Path, folder: Path) -> int:
    """In a process of its own, so that nothing else holds the device."""
    found = zero_to_one(model, folder)
    report.save("gpu_zero_to_one", found)
    report.table("From zero to one and back", ["stage", "median s"], list(found["stages_s"].items()))
    back = all(abs(left) <= TOLERANCE_BYTES for left in found["left_bytes"])
    named = "context" in found["stages_s"]
    held = [
        report.verdict(
            f"memory back at its baseline, {TIMES} times", back, f"at most {max(found['left_bytes'])} bytes"
        ),
        report.verdict("making the context is a stage of its own", named, str(found["stages_s"].get("context"))),
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--service"]:
        raise SystemExit(service_main(Path(sys.argv[2]), Path(sys.argv[3])))
    raise SystemExit(main())
