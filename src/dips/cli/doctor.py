"""`dips doctor`: reports before a run what would go wrong in it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dips.cli.run_options import Keys, asked_security, insecure_asked
from dips.core.config import SettingsFile
from dips.core.errors import ConfigError
from dips.core.units import parse_bits_per_s, parse_count, parse_seconds
from dips.doctor import host, joining
from dips.doctor.findings import Check, Finding, Grade, examined
from dips.doctor.local import DoctorOptions, LocalDoctor
from dips.local.run_file import read_run_file

FOUND = 1
"""Exit code when something would go wrong."""


def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE.toml", help="A file of `dips up` or of `dips deploy`.")
    ] = None,
    master: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="In place of a file: can this machine join the run of this master?")
    ] = "",
    keys: Keys = None,
    params: Annotated[
        str, typer.Option(metavar="COUNT", help="Parameters of the model, such as 7B, where the file does not say.")
    ] = "",
    link: Annotated[
        str, typer.Option(metavar="RATE", help="Rate of the links between servers and clusters; 10gbps unless given.")
    ] = "",
    round_trip: Annotated[
        str,
        typer.Option(
            "--round-trip", metavar="TIME", help="Round trip to the farthest cluster (50ms); with --master: measured."
        ),
    ] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="The run uses no keys.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Check a run or a deployment before it starts: each check is OK, WARN or FAIL, with a remedy.

    With --master and --keys: whether a cluster can join from this machine; the master and every slave's data port are
    dialled with these keys, and kernel buffers are judged by the rate of --link and the measured round trip. Started
    by torchrun or srun, each rank asks for itself and says what it does not reach. Of a file of `dips up`: settings,
    directory, what other users can open in it, packages, data, keys, ports, addresses, memory, disks with the time of a
    flush, files, huge pages, kernel buffers, clock. Of a file of `dips deploy`: keys, contexts, addresses, sizes,
    times, and what the pods of clusters of several ranks reach. Nothing is changed; a probe writes and removes a file
    of 64 MiB. Exit code 1 when anything is FAIL.
    """
    wanted = DoctorOptions(
        parse_count(params) if params else None,
        _positive(parse_bits_per_s(link), "--link", link) if link else None,
        _positive(parse_seconds(round_trip), "--round-trip", round_trip) if round_trip else DoctorOptions.round_trip_s,
    )
    if (file is None) == (not master):
        raise ConfigError(
            "give a FILE.toml to look at a run, or --master HOST:PORT to look at one from a joining machine"
        )
    if file is None:
        why = "with --master the model is the run's, and the round trip is measured"
        _refuse({"--params": params, "--round-trip": round_trip}, why)
        chosen: Iterable[Check] = joining.checks(
            master, asked_security(keys, insecure), wanted.link_bits_per_s, host.read_facts()
        )
    else:
        _refuse({"--keys": keys}, "a FILE.toml says which keys the run has; --keys is for --master")
        chosen = _checks(file, wanted, {"--params": params, "--round-trip": round_trip}, insecure)
    rank = rank_here(os.environ) if file is None else None
    found = []
    for one in examined(chosen):
        if rank is not None:
            one = replace(one, sentence=f"rank {rank}: {one.sentence}")
        # Of several ranks one says what is well.
        if not as_json and (not rank or one.grade is not Grade.OK):
            print(one, flush=True)
        found.append(one)
    if as_json:
        print(json.dumps({"file": str(file or ""), "master": master, "findings": [one.to_json() for one in found]}))
    elif not rank:
        print(summary(found))
    return FOUND if any(one.grade is Grade.FAIL for one in found) else 0


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raises ConfigError for an option that would do nothing."""
    for option, given in options.items():
        if given:
            raise ConfigError(f"{option} does nothing here, because {why}: leave it out")


def _checks(file: Path, wanted: DoctorOptions, of_up: Mapping[str, object], insecure: bool) -> Iterable[Check]:
    """Those of the file's kind. A mistake in the file is the one finding. of_up: options that only a file of `dips up`
    can use."""
    try:
        tables = SettingsFile.read(file).tables
    except ConfigError as error:
        return _mistake(error)
    if "deploy" in tables:
        _refuse(of_up, f"{file} is a file of `dips deploy`, which has the model, and no kernel of a node is asked")
    try:
        if "deploy" in tables:
            from dips.deploy.deploy_file import read_deploy_file
            from dips.doctor import deployment

            return deployment.checks(read_deploy_file(file), wanted.link, host.read_facts())
        if "run" not in tables:
            raise ConfigError(
                f"{file} is neither a file of `dips up` (it has no [run]) nor of `dips deploy` (no [deploy]): give one "
                "of these, such as examples/local.toml"
            )
        plan = read_run_file(file, insecure=insecure_asked(insecure) or None)
    except ConfigError as error:
        return _mistake(error)
    return LocalDoctor(plan, wanted, host.read_facts()).checks()


def _mistake(error: ConfigError) -> Iterable[Check]:
    problem = Finding("settings", Grade.FAIL, str(error))
    return [Check("settings", lambda: [problem])]


def rank_here(environment: Mapping[str, str]) -> int | None:
    """This process's number among those that torchrun or srun has started; None when it is alone."""
    for rank, ranks in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        mine, of = environment.get(rank, ""), environment.get(ranks, "")
        if mine.isdecimal() and of.isdecimal() and int(of) > 1:
            return int(mine)
    return None


def summary(findings: Iterable[Finding]) -> str:
    """The last line of the output: how many findings of each grade, and what follows."""
    counted = Counter(one.grade for one in findings)
    words = ", ".join(f"{counted[grade]} {grade.value}" for grade in Grade)
    verdict = "it would fail: correct what is FAIL" if counted[Grade.FAIL] else "nothing prevents the run"
    return f"{words}: {verdict}"


def _positive(amount: float, option: str, text: str) -> float:
    if amount <= 0:
        raise ConfigError(f"{option} {text!r} must be more than 0")
    return amount
