"""Which tests belong to which tier: first (`make test`), landing (`.ci/run`), long (`make test-long`).

Every file of tests below tests/ belongs to exactly one tier: what neither `first` nor `landing` names is long. Tests
with the mark `long` run in the long tier only, whatever their file. tests/run_all.py runs tiers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIERS = ("first", "landing", "long")
PARTS = 5
"""Of the long tier; each `.ci/run` adds one."""

LANDING = (
    "tests/integration/test_own_loop.py",
    "tests/faults/test_corruptions.py",
    "tests/faults/test_fault_network.py",
    "tests/faults/test_kills.py",
    "tests/slow/test_encrypted_run.py",
    "tests/slow/test_manifests.py",
    "tests/slow/test_master_process.py",
    # Trainers of other people, in one process: seconds each once they are imported.
    "tests/slow/test_hugging_face.py",
    "tests/slow/test_lightning.py",
    # Seconds of a processor each, for which a newcomer would wait.
    "tests/integration/test_carry_loops.py",
    "tests/integration/test_slave_data_server.py",
    "tests/repository/test_layers.py",
    "tests/unit/core/test_carry_memory.py",
    "tests/unit/deploy/test_deploy_client.py",
    "tests/unit/deploy/test_deploy_move.py",
    "tests/unit/local/test_peft_folder.py",
    "tests/unit/planner/test_published_numbers.py",
    "tests/unit/planner/test_scaleacross_search.py",
    "tests/unit/sim/test_sim_counts.py",
    "tests/unit/sim/test_sim_keys.py",
    "tests/unit/sim/test_sim_seeds.py",
    "tests/unit/worker/test_compiled_step.py",
    "tests/unit/worker/test_wrapped_blocks.py",
    # They ask promtool, which a newcomer's machine has not.
    "tests/unit/containers/test_dashboards.py",
    "tests/unit/deploy/test_deploy_monitors.py",
)
FIRST = ("tests/unit", "tests/repository", "tests/integration")
NO_TIER = ("tests/e2e",)
"""The commands below run them."""

COMPUTES = ("tests/unit/", "tests/slow/unit/", "tests/repository/")
"""These files only compute: in the landing and long tier they get the processors that live runs leave."""

ON_DISK = "tests/unit/master/test_journal.py"
"""The unit tests that write on the disk, and not in memory, on every machine."""

OPTIONS: dict[str, tuple[str, ...]] = {"first": (), "landing": (), "long": ("--long",)}

COMMANDS: dict[str, dict[str, tuple[str, ...]]] = {
    "first": {"the checks: make check": ("make", "check")},
    "landing": {
        "no package above its ceilings: python tests/house.py": (sys.executable, "tests/house.py"),
        "300 simulated runs with every fault: make sim SEEDS=300": ("make", "sim", "SEEDS=300"),
        "500 frozen seeds: make frozen": ("make", "frozen"),
        "every state of small runs: make model-check": ("make", "model-check"),
        "every panel, rule and alarm on a real Prometheus: make dashboards-test": ("make", "dashboards-test"),
        "the status page in a real browser: make page-test": ("make", "page-test"),
    },
    "long": {
        "1000 simulated runs with every fault: make sim SEEDS=1000": ("make", "sim", "SEEDS=1000"),
        "ten days of the paper's nine clusters": (
            *(sys.executable, "-m", "dips.cli"),
            *("simulate", "paper-33-days", "--hours", "240"),
        ),
        "the compose file in containers: make compose-test": ("make", "compose-test"),
    },
}
"""Name -> command."""

PATIENT = ("no package", "300 simulated", "500 frozen", "every state", "1000 simulated", "ten days")
"""How the names of commands begin that only compute."""

MAY_SKIP = ("CUDA", "kernel was built without")
"""Words in the reasons of tests that a machine may leave out, since it cannot have what they need."""


def files(tier: str) -> list[str]:
    """The files of a tier, relative to the root."""
    found = (file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "tests").rglob("test_*.py")))
    return [file for file in found if tier_of(file) == tier]


def tier_of(file: str) -> str | None:
    """None: of no tier."""
    for tier, named in (("landing", LANDING), ("first", FIRST), (None, NO_TIER)):
        if any(file == name or file.startswith(f"{name}/") for name in named):
            return tier
    return "long"


def has_long_tests(file: str) -> bool:
    """Whether a file names the mark `long`."""
    return "mark.long" in (ROOT / file).read_text()


def fits_memory(names: Iterable[str]) -> bool:
    """Whether files of tests may write in memory instead of on the disk."""
    return all(name.startswith("tests/unit/") and name != ON_DISK for name in names)
