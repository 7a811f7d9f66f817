"""What the outer step's rate, momentum and clip are worth, over H: runs of `dips compare`, kept one line each.

Every line of benchmarks/results/outer-gain/runs.jsonl is a finished run: its settings, its result, the command of `dips
compare` that repeats it, and the commit that made it. Runs that are kept there are not repeated, so the command goes on
where it was interrupted. All runs of a set-up train the same number of tokens, whatever their H.

    python benchmarks/bench_outer_gain.py [PART...] [--hours T]    run what is missing of these parts, in this order
    python benchmarks/bench_outer_gain.py --table                  the table of docs/convergence.md
    python benchmarks/bench_outer_gain.py --planner                what `dips plan` knows of losses, into its package
    python benchmarks/bench_outer_gain.py --noise                  the noise scale of gradients in the set-up small
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dips.core.release import software_versions
from dips.lab.compare.jobs import do_job, jobs_of
from dips.lab.compare.setup import ComparisonSetup, load_setup
from dips.trainer.sizes import SIZES

ROOT = Path(__file__).resolve().parents[1]
PLANNER = ROOT / "src" / "dips" / "planner" / "local_steps.toml"
KEPT = ROOT / "benchmarks" / "results" / "outer-gain" / "runs.jsonl"
CLIPPED, UNCLIPPED, SYNCHRONOUS, DATA_PARALLEL = "dips", "dips-no-clip", "diloco", "dp"
STEADY, DYNAMIC = (0.9, 0.6), (0.7, 0.8)  # the presets of these names: the default, and the one before it
LONG = 3_145_728  # 96 rounds of four clusters, where small has 24
SHORTER = (393_216, 491_520, 589_824, 688_128)  # four to seven eighths of small's tokens


@dataclass(frozen=True)
class GainRun:
    """One run. lr, tokens: 0: the set-up's."""

    setup: str
    method: str
    inner_steps: int
    outer_lr: float
    outer_momentum: float
    seed: int = 1
    tokens: int = 0
    inner_optimizer: str = "adamw"
    lr: float = 0.0

    def command(self) -> str:
        """The command of `dips compare` that makes the same run."""
        outer = (
            f" --outer-lr {self.outer_lr:g} --outer-momentum {self.outer_momentum:g}"
            if self.method != DATA_PARALLEL
            else ""
        )
        rest = [
            f" --setup {self.setup}" if self.setup != "small" else "",
            f" --inner-steps {self.inner_steps}",
            outer,
            f" --tokens {self.tokens}" if self.tokens else "",
            f" --inner-optimizer {self.inner_optimizer}" if self.inner_optimizer != "adamw" else "",
            f" --lr {self.lr:g}" if self.lr else "",
        ]
        return f"dips compare --methods {self.method}{''.join(rest)} --seeds {self.seed}"

    def made(self) -> ComparisonSetup:
        return load_setup(self.setup).with_overrides(
            inner_steps=self.inner_steps,
            tokens=self.tokens or None,
            inner_optimizer=self.inner_optimizer,
            lr=self.lr or None,
            device="cpu",
            evaluations=1,  # the loss at the end is the same; the curve is not kept
            master={"outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum},
        )


def _grid(
    steps: Sequence[int], pairs: Sequence[tuple[float, float]], methods: Sequence[str], **rest: Any
) -> Iterator[GainRun]:
    setup = rest.pop("setup", "small")
    for method, pair, inner_steps in product(methods, pairs, steps):
        yield GainRun(setup, method, inner_steps, *pair, **rest)


def _dp(**rest: Any) -> GainRun:
    """Data parallel, which has no H and no outer step: 16 and one pair stand for them."""
    return GainRun(rest.pop("setup", "small"), DATA_PARALLEL, 16, *DYNAMIC, **rest)


H = (4, 16, 64)
LESS = ((0.9, 0.5), (0.7, 0.5))
"""The pairs with less momentum that every part compares with the presets'."""

HARD = ("changing-speed", "coming-and-going", "ten-times-slower", "jitter", "killed", "slow-link")
PARTS: dict[str, list[GainRun]] = {
    "gain": [_dp(), *_grid(H, (*LESS, DYNAMIC, STEADY), (CLIPPED,))],
    "steady": [run for seed in (2, 3) for run in _grid(H, (STEADY,), (CLIPPED,), seed=seed)],
    "steady-hard": [
        run for seed in (2, 3) for setup in HARD for run in _grid((16,), (STEADY,), (CLIPPED,), setup=setup, seed=seed)
    ],
    "data-parallel": [_dp(seed=seed, tokens=tokens) for seed in (1, 2, 3) for tokens in (*SHORTER, 0)],
    "steady-muon": list(_grid((16,), (STEADY,), (CLIPPED,), inner_optimizer="muon", lr=6e-3, seed=2)),
    "seeds": [run for seed in (2, 3) for run in (_dp(seed=seed), *_grid(H, (*LESS, DYNAMIC), (CLIPPED,), seed=seed))],
    "hard": [run for setup in HARD for run in _grid((16,), (*LESS, DYNAMIC, STEADY), (CLIPPED,), setup=setup)],
    "muon": [
        _dp(inner_optimizer="muon", lr=6e-3),
        *_grid((16,), (*LESS, DYNAMIC), (CLIPPED,), inner_optimizer="muon", lr=6e-3),
    ],
    "noise": [_dp(setup="large-batch"), *_grid((16,), (*LESS, DYNAMIC), (CLIPPED,), setup="large-batch")],
    "length": [_dp(tokens=LONG), *_grid((16,), (*LESS, DYNAMIC), (CLIPPED,), tokens=LONG)],
    "short": list(_grid((2, 1), (*LESS, DYNAMIC), (CLIPPED,))),
    "unclipped": list(_grid(H, (*LESS, DYNAMIC), (UNCLIPPED,))),
    "together": list(_grid(H, (*LESS, DYNAMIC), (SYNCHRONOUS,))),
    "more": list(_grid(H, ((0.7, 0.6), (1.0, 0.0), (0.7, 0.3), (1.0, 0.3)), (CLIPPED, UNCLIPPED))),
    "larger": list(_grid((16, 128), (*LESS, DYNAMIC), (CLIPPED,), setup="larger")),
}


# ---- runs ----


def kept() -> dict[GainRun, dict[str, Any]]:
    """The results of finished runs."""
    lines = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    return {GainRun(**line["run"]): line for line in lines}


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def run(one: GainRun, commit: str) -> dict[str, Any]:
    """Make the run, in this process, and return its line."""
    setup, began_s = one.made(), time.perf_counter()
    (job,) = jobs_of([one.method], [one.seed], setup, ())
    record = do_job(job, lambda tokens, virtual_s: None)
    kappas = [fact.kappa for fact in record.judged if fact.kappa is not None]
    pushes = [push for fact in record.judged for push in fact.pushes if push.verdict == "APPLIED"]
    found = {
        "ended": record.ended,
        "loss": None if record.loss is None else round(record.loss, 4),
        "tokens": record.tokens,
        "virtual_s": round(record.virtual_s, 1),
        "of_ideal": round(record.tokens / setup.ideal_tokens(record.virtual_s), 4),
        "rounds": record.rounds,
        "clipped": round(statistics.fmean(kappa < 1 for kappa in kappas), 3) if kappas else None,
        "stale": round(statistics.fmean(push.staleness for push in pushes), 3) if pushes else None,
    }
    return {
        "run": asdict(one), "found": found, "command": one.command(), "commit": commit,
        "took_s": round(time.perf_counter() - began_s), "torch": software_versions().get("torch"),
    }  # fmt: skip


# ---- noise of gradients ----

MEASURED_EVERY, MEASURED_STEPS = 128, 16


def noise() -> list[dict[str, float]]:
    """The noise scale of gradients in three parts of data parallel training on the set-up `small`, seed 1.

    noise_tokens: the variance of the gradient of one token over the mean gradient's square, tr(S) / |G|^2: in a batch
    of so many tokens noise and signal are equal. Unbiased, from the gradients of a batch's rows.
    """
    import numpy as np
    import torch

    from dips.core.messages import DataRange
    from dips.lab.compare.engine import run_data_parallel
    from dips.trainer.config import TrainConfig
    from dips.trainer.data import make_batch
    from dips.trainer.train import ByteLearner, read_text

    setup, found = load_setup("small").with_overrides(evaluations=1), list[dict[str, float]]()

    class Measuring(ByteLearner):
        steps, sums = 0, np.zeros(2)

        def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
            self.steps += 1
            if (self.steps - 1) % MEASURED_EVERY >= MEASURED_EVERY - MEASURED_STEPS:
                rows = torch.stack([self._gradient(row) for row in ranges])
                mean = rows.mean(0)
                of_rows = float((rows - mean).square().sum()) / (len(rows) - 1)
                self.sums += of_rows * setup.inner.sequence_tokens, float(mean.square().sum()) - of_rows / len(rows)
            if not self.steps % MEASURED_EVERY:
                found.append({"tokens": progress_tokens, "noise_tokens": round(self.sums[0] / self.sums[1])})
                self.sums = np.zeros(2)
            return super().step(ranges, progress_tokens)

        def _gradient(self, row: DataRange) -> torch.Tensor:
            batch = make_batch(self._text, [row])
            loss = self._net.loss(batch.inputs, batch.targets)
            return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(self._net.parameters()))])

    inner = setup.inner.model_dump()
    config = TrainConfig(seed=1, data_seed=1, model_size=setup.model.size, threads=1, device="cpu", **inner)
    run_data_parallel(setup, 1, Measuring(config, read_text(config), setup.run.tokens), lambda flat: 0.0)
    return found


# ---- tables ----

LABELS = {CLIPPED: "usual norm", UNCLIPPED: "none", SYNCHRONOUS: "none; rounds wait for all"}


def table(runs: Mapping[GainRun, dict[str, Any]]) -> str:
    """A row for each set-up, method, rate and momentum, a column for each H; a cell: the loss, mean and deviation over
    its seeds, and how many these are."""
    rows: dict[tuple[str, ...], dict[int, list[float | None]]] = {}
    for one, line in runs.items():
        what = one.setup + (f", {one.inner_optimizer}" if one.inner_optimizer != "adamw" else "")
        what += f", {line['found']['tokens']:,} tokens" if one.tokens else ""
        outer = ("data parallel", "")
        if one.method != DATA_PARALLEL:
            outer = f"{one.outer_lr:g}, {one.outer_momentum:g}", LABELS[one.method]
        rows.setdefault((what, *outer), {}).setdefault(one.inner_steps, []).append(line["found"]["loss"])
    steps = sorted({inner_steps for cells in rows.values() for inner_steps in cells})
    text = [
        ["set-up", "rate, momentum", "clip", *(f"H {inner_steps}" for inner_steps in steps)],
        ["---"] * (3 + len(steps)),
    ]
    for row, cells in sorted(rows.items()):
        text.append([*row, *(_cell(cells.get(inner_steps, [])) for inner_steps in steps)])
    return "\n".join(f"| {' | '.join(row)} |" for row in text)


def _cell(losses: Sequence[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    if not known or len(known) < len(losses):
        return "not finite" if losses else ""
    spread = f" ± {statistics.stdev(known):.3f} ({len(known)})" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.3f}{spread}"


# ---- what the planner knows ----


def planner_text(runs: Mapping[GainRun, dict[str, Any]]) -> str:
    """The planner's local_steps.toml: losses of the default preset over H, and of data parallel over tokens."""
    setup, slow = load_setup("small"), load_setup("slow-link")
    both_ways_s = 2 * slow.wire_bytes() * 8 / slow.least_bits_per_s
    text = [
        "# What local steps cost: losses at the ends of runs, in nats per byte, by seed: docs/convergence.md, The",
        "# outer step over H. Made from the records by `python benchmarks/bench_outer_gain.py --planner`.",
        "",
        "[measured]",
        f'source = "{KEPT.relative_to(ROOT)}, set-ups small and slow-link of dips compare"',
        'preset = "steady"',
        f"parameters = {SIZES[setup.model.size].n_elems}",
        f"clusters = {setup.n_clusters}",
        f"step_tokens = {setup.tokens_per_step}",
        f"tokens = {setup.run.tokens}",
        f"slow_link_steps = {both_ways_s / min(slow.step_s):g}",
    ]
    rows: dict[str, dict[int, float]] = {}
    for one, line in runs.items():
        if one.inner_optimizer != "adamw" or one.lr:
            continue
        if (one.setup, one.method) == ("small", DATA_PARALLEL):
            head = f"[[data_parallel]]\ntokens = {one.tokens or setup.run.tokens:7}"
        elif one.setup in ("small", "slow-link") and one.method == CLIPPED and not one.tokens:
            if (one.outer_lr, one.outer_momentum) != STEADY:
                continue
            head = f'[[local_steps]]\nsetup = "{one.setup}"\nsync_every = {one.inner_steps:2}'
        else:
            continue
        rows.setdefault(head, {})[one.seed] = line["found"]["loss"]
    for head, losses in sorted(rows.items()):
        by_seed = ", ".join(f"{seed} = {loss}" for seed, loss in sorted(losses.items()))
        text += ["", f"{head}\nlosses = {{ {by_seed} }}"]
    return "\n".join(text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all, in this order")
    parser.add_argument("--hours", type=float, default=1e6, help="begin no run after so many hours")
    parser.add_argument(
        "--planner", action="store_true", help=f"write {PLANNER.name} from what is kept, and run nothing"
    )
    parser.add_argument("--noise", action="store_true", help="print the noise scale of gradients, and keep nothing")
    parser.add_argument("--table", action="store_true", help="print the table of what is kept, and run nothing")
    options = parser.parse_args()
    if options.noise:
        print(json.dumps(noise()))
        return 0
    if options.planner:
        PLANNER.write_text(planner_text(kept()))
        return 0
    if options.table:
        print(table(kept()))
        return 0
    if wrong := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"there is no part {wrong[0]!r}: choose from {', '.join(PARTS)}")
    ends_s, commit = time.monotonic() + 3600 * options.hours, _commit()
    for part in options.parts or PARTS:
        for one in PARTS[part]:
            if one in kept():
                continue
            if time.monotonic() > ends_s:
                return 0
            line = run(one, commit)
            with KEPT.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{part}: {line['command']}: {line['found']['loss']} ({line['took_s']} s)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
