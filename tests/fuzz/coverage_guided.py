"""Coverage-guided fuzzing of the same targets by atheris (libFuzzer), where it is installed; a process for each.

As a module it is that process: python -m fuzz.coverage_guided TARGET SECONDS SEED FOLDER.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LEAST_S = 12.0
"""Of one target, on top of its start."""

SEEDS = 150
MOST_BYTES = 4096
MEMORY_MB = 3000

TRACED = [
    *(f"dips.core.{name}" for name in ("layout", "ids", "units", "config", "wire")),
    *(f"dips.core.net.{name}" for name in ("codec_protobuf", "messages_pb2", "data_header", "addresses", "keys")),
    *(f"dips.core.observe.{name}" for name in ("tape", "failpoints")),
    *(f"dips.slave.{name}" for name in ("data_port", "state.staging", "snapshot_files", "disk")),
    *(f"dips.master.{name}" for name in ("archive", "journal", "state.ledger")),
    *(f"dips.master.state.{name}" for name in ("leases", "penalty_types")),
    *(f"dips.worker.{name}" for name in ("checkpoint_files", "torch_state", "state.saved")),
    *("dips.local.run_file", "dips.core.server_site", "dips.lab.sim.scale.scenario"),
]
"""What reads bytes. Tracing everything would take half a minute at each start, and compiled kernels cannot be."""

_WORDS = re.compile(r"#(\d+)\s+(INITED|DONE)\s+cov: (\d+) ft: (\d+) corp: (\d+)")


def installed() -> bool:
    return importlib.util.find_spec("atheris") is not None


def feed_for(targets: Sequence[Any], seconds: float, seed: int) -> list[str]:
    """A few targets, others with another seed, so that all have their turn. Returns violations; prints a table."""
    if not installed():
        print("atheris is not installed here (Linux on x86-64 has it): no coverage-guided part", flush=True)
        return []
    names = [target.name for target in targets]
    random.Random(seed).shuffle(names)
    turns = max(1, min(len(names), int(seconds / LEAST_S)))
    print(f"coverage-guided, {turns} of {len(names)} targets, {seconds / turns:.0f} s each", flush=True)
    found = []
    for name in names[:turns]:
        line, trouble = _run(name, seconds / turns, seed)
        print(f"  {name}: {line}", flush=True)
        found += [trouble] if trouble else []
    return found


def _run(name: str, seconds: float, seed: int) -> tuple[str, str]:
    """What libFuzzer counted, and a violation if it found one."""
    with TemporaryDirectory(prefix="dips-fuzz-") as folder:
        command = [sys.executable, "-m", "fuzz.coverage_guided", name, str(round(seconds)), str(seed), folder]
        own = {**os.environ, "DIPS_FUZZ_SCRATCH": folder}
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=own)
    told = _WORDS.findall(ended.stderr)
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.splitlines() if not line.startswith(("INFO", "#"))]
        return "violation", f"{name} (coverage-guided): " + "\n".join(lines[-25:])[-3000:]
    if not told:
        return "violation", f"{name} (coverage-guided): libFuzzer said nothing: {ended.stderr[-1000:]}"
    inputs, _, coverage, _, corpus = told[-1]
    first = told[0]
    return (
        f"{inputs} inputs, coverage {first[2]} -> {coverage} branches, corpus {first[4]} -> {corpus} inputs: "
        f"{int(coverage) - int(first[2])} new branches"
    ), ""


def child(name: str, seconds: int, seed: int, folder: Path) -> None:
    """Fuzz one target; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=TRACED, enable_loader_override=False):
        from fuzz.catalog import targets
        from fuzz.runner import feed
    target = next(target for target in targets() if target.name == name)
    feed(target, SEEDS, seed)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(target.corpus):
        (corpus / f"{number:04d}").write_bytes(data[:MOST_BYTES])

    def one(data: bytes) -> None:
        target.take(target.finish(data) if target.finish is not None and len(data) % 3 else data)

    options = {
        "max_total_time": seconds, "seed": seed % (1 << 31) or 1, "max_len": MOST_BYTES, "rss_limit_mb": MEMORY_MB,
        "timeout": 20, "artifact_prefix": f"{folder}/",
    }  # fmt: skip
    atheris.Setup([sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
