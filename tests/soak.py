"""python tests/soak.py --minutes M: the same training twice, in calm and under a storm of kills, and a judgement.

Real processes on this machine with keys and encryption: a master, two slaves and four clusters of unequal speed that
train a small byte model, and an evaluator. The storm kills (SIGKILL) at random moments, with the spread of the paper's
Table 1. Exit code 1 when anything is not as promised: the held-out loss more than 0.05 above the calm run's at equal
tokens, tokens that do not add up, a process that did not come back, a promise that `dips verify` finds broken, or a
planned kill that never came.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from support.storm import Kill, Storm, compared, planned, play, table, worse_than_calm

from dips.core.clock import SystemClock
from dips.core.errors import DipsError
from dips.judge.verify import verify_or_say
from dips.local import demo
from dips.local.local_run import LocalRun
from dips.local.log_files import HELDOUT_TAPE, heldout_losses, tape_path
from dips.local.options import command_line
from dips.local.run_directory import DEMO, Mark, claim
from dips.master.page.history import HeldoutPoint
from dips.master.state.records import RoundPhase

CALIBRATION_S = 3.0
CALM_SHARE = 0.35
"""Of the minutes; the storm takes longer over as many tokens, and starts and judgement take the rest."""

SECONDS_A_KILL = 10.0
STALL_S = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="about how long all of it takes (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the storm (default 0)")
    parser.add_argument("--directory", type=Path, default=None, help="where the runs are kept (else nowhere)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return soak(arguments.minutes, arguments.seed, arguments.directory or Path(folder))


def soak(minutes: float, seed: int, directory: Path) -> int:
    """Both runs, and what is to be said of them; the exit code."""
    wish = demo.DemoOptions(minutes=CALM_SHARE * minutes, faults=False)
    train, names = demo.train_settings(wish), demo.cluster_names(wish.clusters)
    gaps, cores = demo.speed_gaps(wish.clusters), os.cpu_count() or 1
    say(f"measuring how fast this machine trains ({cores} cores, load {os.getloadavg()[0]:.1f})")
    speed = demo.measure_tokens_per_s(command_line(train), CALIBRATION_S, min(cores, wish.clusters))
    tokens = demo.tokens_to_train(speed, gaps, cores, wish.minutes)
    servers = ["master", *(f"s{i}" for i in range(wish.slaves))]
    kills = planned(names, servers, int(60 * CALM_SHARE * minutes / SECONDS_A_KILL), random.Random(seed))
    say(f"{tokens} tokens each; {len(kills)} kills are planned, seed {seed}")
    calm, calm_losses = run(wish, directory / "calm", tokens, [])
    storm, storm_losses = run(wish, directory / "storm", tokens, kills)
    wrong = [f"calm run: {sentence}" for sentence in calm.wrong] + [f"storm: {sentence}" for sentence in storm.wrong]
    wrong += worse_than_calm(calm_losses, storm_losses)
    report(calm, storm, compared(calm_losses, storm_losses))
    for sentence in wrong:
        say(f"VIOLATION: {sentence}")
    say("violations: " + str(len(wrong)))
    return 1 if wrong else 0


def run(wish: demo.DemoOptions, directory: Path, tokens: int, kills: list[Kill]) -> tuple[Storm, list[HeldoutPoint]]:
    """One run to so many tokens, verified; what happened, and its held-out losses."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    clock = SystemClock()
    wish = demo.DemoOptions(**{**vars(wish), "run_dir": directory})
    plan = demo.make_plan(wish, demo.train_settings(wish), tk_max=0)
    name = directory.name
    with claim(directory, Mark(demo.RUN_ID, DEMO, "soak")) as claimed:
        with LocalRun(plan, claimed, clock, lambda sentence: None, STALL_S) as local:
            local.start()
            storm = play(local, kills, tokens, lambda sentence: say(f"{name}: {sentence}"))
    verified = verify_or_say(directory)["verify"]
    if verified != "ok":
        storm.wrong.append(f"dips verify says: {verified}")
    return storm, heldout_losses(tape_path(directory, HELDOUT_TAPE))


def report(calm: Storm, storm: Storm, losses: tuple[int, float, float]) -> None:
    """Counts and figures, on standard output."""
    phases = Counter(death.phase for death in storm.deaths)
    victims = Counter(death.victim for death in storm.deaths)
    for name, found in (("calm", calm), ("storm", storm)):
        print(f"{name}: {found.seconds:.0f} s, {found.tokens} tokens, {len(found.deaths)} kills")
        print("\n".join(f"  {line}" for line in table(found.clusters, found.deaths)))
    print("kills: " + ", ".join(f"{name} {n}" for name, n in sorted(victims.items())))
    print("phase of the round in which they fell: " + ", ".join(f"{p.value} {phases[p.value]}" for p in RoundPhase))
    tokens, calm_loss, storm_loss = losses
    difference = storm_loss - calm_loss
    figures = f"calm {calm_loss:.3f}, storm {storm_loss:.3f}, {difference:+.3f}"
    print(f"held-out loss at {tokens} tokens: {figures}", flush=True)


def say(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DipsError as error:
        print(f"soak: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
