"""What `pip install .` gives: the four packages, the command, and nothing that only a checkout has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("model_loader", "autoscaler", "function_runtime", "control_plane")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what is versioned, as from a fresh checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*command, str(source)], check=True, timeout=120)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed by itself; its dependencies are this interpreter's."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, timeout=120)
    return target


def run_outside(installed: Path, tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(installed), "HOME": str(tmp_path)}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)


def test_wheel_holds_every_module_of_the_four_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert sources <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {*PACKAGES, next(top for top in tops if top.endswith(".dist-info"))}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_names_its_command_and_its_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    read = {name.split("/")[-1]: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "stoker = control_plane.cli.main:main" in read["entry_points.txt"]
    metadata = read["METADATA"]
    assert "Name: stoker\n" in metadata
    assert {"demo", "test", "s3", "postgres"} <= {
        line.removeprefix("Provides-Extra: ") for line in metadata.splitlines() if line.startswith("Provides-Extra")
    }


def test_installed_command_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    began_s = time.perf_counter()
    done = run_outside(installed, tmp_path, sys.executable, str(installed / "bin" / "stoker"), "--help")
    took_s = time.perf_counter() - began_s
    assert done.returncode == 0, done.stderr
    for name in ("up", "down", "deploy", "ls", "ps", "invoke", "logs", "usage", "why", "delete", "rollback", "demo"):
        assert f"\n  {name} " in done.stdout
    assert took_s < 5, "a command line must answer at once"


def test_control_plane_starts_without_torch_numpy_or_the_engine(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys, control_plane.cli.main, control_plane.cli.up, control_plane.app\n"
        "heavy = {'torch', 'triton', 'transformers', 'numpy', 'gguf', 'function_runtime.engine'}\n"
        "print(sorted(heavy & set(sys.modules)), control_plane.app.__file__)"
    )
    done = run_outside(installed, tmp_path, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    found, place = done.stdout.split("] ")
    assert (found, place.startswith(str(installed))) == ("[", True)


def test_constraints_pin_every_dependency_of_every_extra() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            assert [item.operator for item in requirement.specifier] == ["=="], line
            pinned[canonicalize_name(requirement.name)] = requirement.specifier
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    missing = {name for text in wanted if (name := canonicalize_name(Requirement(text).name)) not in pinned}
    assert missing == set()
    for text in wanted:
        requirement = Requirement(text)
        (pin,) = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.version), text
