"""Virtual environments of their own for the systems that bench_sync.py compares with.

They get the same PyTorch as this interpreter, from the same place as `make` would take it (TORCH_INDEX).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

REQUIREMENTS = {"torchft": "torchft-nightly", "hivemind": "hivemind"}


class NotInstallable(Exception):
    """A system cannot be installed here; says why."""


def interpreter(name: str, directory: Path) -> Path:
    """The interpreter of the environment of a system, which is made if it is not there. Raises NotInstallable."""
    home = directory / name
    python, stamp = home / "bin" / "python", home / ".installed"
    if stamp.exists():
        return python
    print(f"making {home}: {REQUIREMENTS[name]} and PyTorch", file=sys.stderr, flush=True)
    if not python.exists():
        venv.create(home, with_pip=True)
    torch, index = f"torch=={version('torch').partition('+')[0]}", os.environ.get("TORCH_INDEX")
    if index:
        _pip(name, python, "--no-deps", "--index-url", index, torch)
    _pip(name, python, torch)
    _pip(name, python, REQUIREMENTS[name], torch)
    stamp.touch()
    return python


def versions(python: Path | str, *packages: str) -> dict[str, str]:
    """Of packages that are installed beside an interpreter."""
    ask = "import json, sys, importlib.metadata as m; print(json.dumps(list(map(m.version, sys.argv[1:]))))"
    told = subprocess.run([str(python), "-c", ask, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, json.loads(told.stdout), strict=True))


def _pip(name: str, python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise NotInstallable(f"{name} cannot be installed here ({why}): leave it out with --peers, or see {python}")
