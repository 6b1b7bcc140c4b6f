"""The steps of a Containerfile, run in folders instead of by a container engine: enough of the language for ours.

    python3 steps.py CONTAINERFILE CONTEXT BASE TARGET [--mount FOLDER]... [--arg NAME=VALUE]...

BASE is a folder with Debian in it (debootstrap makes one) and stands for every `FROM ${BASE}`; each stage begins with a
copy of it, RUN is chroot, and TARGET becomes a link to the last stage's folder. What the image says about user,
environment and command goes to TARGET.json. Limits: FROM, ARG, ENV, RUN, COPY, WORKDIR, USER, EXPOSE, ENTRYPOINT and
CMD as used there; no layers, no cache; variables of ENV and ARG are those of the stage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

PASSED_ON = ("PIP_", "SOURCE_DATE_EPOCH", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "NO_PROXY")
HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
"""What a container engine or the machine's administrator provides while an image is built."""


class Stage:
    def __init__(self, root: Path, name: str, arguments: dict[str, str]) -> None:
        self.root, self.name = root, name
        self.arguments = arguments
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.folder, self.user = "/", "0:0"
        self.entrypoint: list[str] = []
        self.command: list[str] = []

    def inside(self, path: str) -> Path:
        return self.root / (path if path.startswith("/") else f"{self.folder}/{path}").lstrip("/")


def instructions(text: str) -> list[tuple[str, str]]:
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(word.upper(), rest) for word, _, rest in (line.strip().partition(" ") for line in whole.splitlines())]


def pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (part.partition("=") for part in shlex.split(text))]


def run(stage: Stage, command: str, mounts: list[str]) -> None:
    inherited = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    environment = {**inherited, "DEBIAN_FRONTEND": "noninteractive", **stage.arguments, **stage.environment}
    script = f"cd {shlex.quote(stage.folder)} && {command}"
    bound = []
    _lend(stage.root)
    try:
        for mount in ("/proc", *mounts):
            place = stage.root / mount.lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            if subprocess.run(["mount", "--bind", mount, str(place)], check=False, capture_output=True).returncode == 0:
                bound.append(place)
            elif mount != "/proc":
                shutil.copytree(mount, place, dirs_exist_ok=True)
        subprocess.run(["chroot", str(stage.root), "/bin/sh", "-c", script], env=environment, check=True)
    finally:
        for place in reversed(bound):
            subprocess.run(["umount", str(place)], check=False)


def copy(stage: Stage, stages: dict[str, Stage], context: Path, text: str) -> None:
    parts = shlex.split(text)
    source = context
    if parts[0].startswith("--from="):
        source = stages[parts.pop(0).removeprefix("--from=")].root
    *names, target = parts
    for name in names:
        found, place = source / name.lstrip("/"), stage.inside(target)
        if found.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(
                found, place, symlinks=True, dirs_exist_ok=True, ignore=leave if source == context else None
            )
        else:
            place = place / found.name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, place)


def _lend(root: Path) -> None:
    """Before every step: packages that a step installs write some of them anew."""
    for path in HOST_FILES:
        if os.path.exists(path):
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            shutil.copy(path, place)


def begin(base: Path, work: Path, name: str, arguments: dict[str, str]) -> Stage:
    root = work / name
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(["cp", "-a", str(base), str(root)], check=True)
    return Stage(root, name, arguments)


def build(
    containerfile: Path, context: Path, base: Path, target: Path, mounts: list[str], given: dict[str, str]
) -> Stage:
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for word, rest in instructions(containerfile.read_text()):
        began_s = time.monotonic()
        if word == "FROM":
            name = rest.partition(" AS ")[2] or "final"
            stage = stages[name] = begin(base, target.parent, f"{target.name}.{name}", {})
        elif stage is None:
            continue  # an ARG before the first stage names the base
        elif word == "ARG":
            ((name, value),) = pairs(rest)
            stage.arguments[name] = given.get(name, value)
        elif word == "ENV":
            stage.environment |= dict(pairs(rest))
        elif word == "RUN":
            run(stage, rest, mounts)
        elif word == "COPY":
            copy(stage, stages, context, rest)
        elif word == "WORKDIR":
            stage.folder = rest
            stage.inside(rest).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = rest
        elif word == "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        elif word == "CMD":
            stage.command = json.loads(rest)
        elif word != "EXPOSE":
            raise SystemExit(f"steps.py does not know {word}")
        short = re.sub(r"\s+", " ", rest)[:90]
        print(f"{time.monotonic() - began_s:7.1f} s  {word} {short}", flush=True)
    if stage is None:
        raise SystemExit(f"{containerfile} has no FROM")
    for path in ("/etc/pip.conf", "/etc/resolv.conf"):
        (stage.root / path.lstrip("/")).unlink(missing_ok=True)
    return stage


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("containerfile", "context", "base", "target"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--mount", action="append", default=[])
    parser.add_argument("--arg", action="append", default=[])
    told = parser.parse_args()
    given = dict(pairs(" ".join(told.arg)))
    stage = build(told.containerfile, told.context, told.base, told.target, told.mount, given)
    told.target.unlink(missing_ok=True)
    told.target.symlink_to(stage.root)
    image = {
        "env": stage.environment, "user": stage.user, "folder": stage.folder,
        "entrypoint": stage.entrypoint, "command": stage.command,
    }  # fmt: skip
    told.target.with_suffix(".json").write_text(json.dumps(image, indent=2) + "\n")
    size = sum(each.lstat().st_size for each in stage.root.rglob("*") if not each.is_symlink() and each.is_file())
    print(f"{stage.root}: {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
