"""python tests/e2e/compose/run.py: builds the images, trains in containers, harms each of them, and leaves nothing.

One line for each step, with the published version before and after. Ends with 0 when every check held, with 2 when
there is no docker to be had at all, with 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from scenario import Report, build, play
from stack import EVALUATOR, NODES, PROJECT, ROLES, ROOT, Stack, StepFailed, command, wait

sys.path.insert(0, str(ROOT / "deploy" / "compose"))
from up import Missing, compose_command, require_engine

ENGINE = ROOT.parent / "shared" / "tools" / "docker-up"
"""Starts an engine on machines that have none running, where this file is there (DOCKER_UP names another one)."""

IMAGES = {"prometheus": "prom/prometheus:v2.55.1", "grafana": "grafana/grafana:11.6.0"}
PULL_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make compose-test", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave containers, networks and volumes as they are")
    parser.add_argument("--no-build", action="store_true", help="take the images as they are")
    parser.add_argument("--only-images", action="store_true", help="build the images, for a later test")
    given = parser.parse_args()
    begin_s = time.monotonic()
    engine = Path(os.environ.get("DOCKER_UP", ENGINE))
    try:
        started = _start_engine(engine)
        compose = compose_command()
    except NoEngine as why:
        print(f"compose-test: not possible here: {why}")
        return 2
    except (Missing, StepFailed) as error:
        print(f"compose-test: FAILED: {error}", flush=True)
        return 1
    try:
        return _test(compose, given, begin_s)
    finally:
        if started and not given.keep:
            _stop_engine(engine)


class NoEngine(Exception):
    """There is no docker to be had, and nothing that would start one."""


def _start_engine(engine: Path) -> bool:
    """Whether an engine had to be started. Raises NoEngine, or StepFailed when it does not start."""
    why = _no_engine()
    if engine.is_file():  # also where one is running: it makes the images' base where no registry is reached
        command(str(engine))
        print(f"engine: {'started' if why else 'is running'} ({engine.name})", flush=True)
    elif why:
        raise NoEngine(why)
    return bool(why)


def _stop_engine(engine: Path) -> None:
    """Returns when it is gone: the next one refuses to start beside its pid file."""
    running = _daemons()
    subprocess.run([str(engine), "down"], check=False)
    wait("the engine ends", lambda: not running & _daemons())


def _daemons() -> set[str]:
    """Numbers of the engine's processes."""
    found = set()
    for name in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended since
            if name.read_text().strip() == "dockerd":
                found.add(name.parent.name)
    return found


def _no_engine() -> str:
    """Why no engine answers; empty when one does."""
    if shutil.which("docker") is None:
        return "docker is not installed here"
    try:
        require_engine()
    except Missing as missing:
        return str(missing)
    return ""


def _test(compose: list[str], given: argparse.Namespace, begin_s: float) -> int:
    files = ["docker-compose.yml", *_stand_in()]
    ports = {"PAGE_PORT": "18080", "PROMETHEUS_PORT": "19090", "GRAFANA_PORT": "13000"}
    stack, report = Stack(compose, files, ports), Report()
    if given.only_images:
        build(stack, report)
        return 0
    try:
        stack.remove()
        play(stack, report, ports, ROOT / "runs" / PROJECT, build_first=not given.no_build)
    except StepFailed as error:
        _show_logs(stack)  # first: of a long log only the end may be kept
        print(f"compose-test: FAILED after {report.checks} checks: {error}", flush=True)
        return 1
    finally:
        if not given.keep:
            stack.remove()
    print(f"compose-test: {report.checks} checks passed in {time.monotonic() - begin_s:.0f} s ({' '.join(compose)})")
    return 0 if report.checks else 1


def _stand_in() -> list[str]:
    """The file that replaces images which cannot be had."""
    missing = [name for name, image in IMAGES.items() if not _can_be_had(image)]
    if not missing:
        return []
    print(
        f"images: {', '.join(IMAGES[name] for name in missing)} cannot be had here: Debian's Prometheus stands in for "
        "the published one, in its service; Grafana is NOT part of this run",
        flush=True,
    )
    return ["tests/e2e/compose/stand-in.yml"]


def _can_be_had(image: str) -> bool:
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode == 0:
        return True
    try:
        done = subprocess.run(["docker", "pull", "-q", image], capture_output=True, check=False, timeout=PULL_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _show_logs(stack: Stack) -> None:
    for name in ("keys", *ROLES, *NODES, EVALUATOR, "link-b", "prometheus"):
        try:
            lines = stack.logs(name).splitlines()[-25:]
        except StepFailed:
            continue
        print(f"---- {name}", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
