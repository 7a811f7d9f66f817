"""`dips profile`: measures devices and links, and writes the profile file that the planner's commands read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dips.core.config import nearest
from dips.core.errors import ConfigError
from dips.core.net.addresses import parse_address
from dips.core.units import format_bytes
from dips.planner.cluster import ClusterFile, read_setup
from dips.planner.profile import LayerTime, LinkRate, ProfileFile, ProfileHead, merged, read_profile, write_profile
from dips.planner.run.link_probe import MOST_BYTES, fit, listening, probe, serve

app = typer.Typer(no_args_is_help=True)

UNSTEADY = 0.25
"""The spread above which a person is told that the numbers are not to be trusted."""

MOST_ROUNDS = 10_000
MOST_THREADS = 1024
MOST_SEQUENCES = 1 << 16
MOST_SERVED_S = 7 * 86_400.0

ProblemFile = Annotated[
    str,
    typer.Argument(metavar="FILE", help="The planner's TOML file, or a shipped one's name; without its [profile]."),
]
Out = Annotated[
    Path, typer.Option(metavar="PROFILE", help="The profile file; what it has of others stays, if it is of this model.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@app.command()
def device(
    file: ProblemFile,
    out: Out = Path("profile.toml"),
    device: Annotated[str, typer.Option(metavar="KIND", help="Its kind, as [[sites]] name it with `device`.")] = "cpu",
    module: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your own layers; else those that FILE describes.")
    ] = None,
    microbatch: Annotated[
        str | None, typer.Option(metavar="N,...", help="Sequences of a microbatch; those of [training] and the double.")
    ] = None,
    on: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, or cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of layers that FILE describes.")] = "float32",
    threads: Annotated[int, typer.Option(metavar="N", help="Of torch on a processor.")] = 1,
    rounds: Annotated[int, typer.Option(metavar="N", help="Measurements of each; the median counts.")] = 10,
    as_json: AsJson = False,
) -> int:
    """Measure each layer of a model on this machine's device: forward pass, gradient of the input and gradient of the
    weights, at several sizes of a microbatch.

    Your own layers: FUNCTION returns (modules, example): a torch module for each layer of the model, or these with the
    embedding before and the output layer after them; and example(n), the first one's input for n sequences. Layers
    that FILE describes are all equal, so one of them is measured.
    """
    _check_count("--rounds", rounds, 3, MOST_ROUNDS)
    _check_count("--threads", threads, 1, MOST_THREADS)
    setup = read_setup(file, profiled=False)
    sizes = _sizes(microbatch, setup.training.microbatch_sequences)
    before = _existing(out, setup)
    source, layers = _measured_layers(setup, module, sizes, on, dtype, threads, rounds, device)
    profile = _written(out, before, ProfileFile(str(out), _head(setup, source), layers=layers))
    _tell(profile, out, as_json, _layers_table(layers))
    return 0


def _measured_layers(
    setup: ClusterFile,
    module: str | None,
    sizes: Sequence[int],
    on: str,
    dtype: str,
    threads: int,
    rounds: int,
    kind: str,
) -> tuple[str, tuple[LayerTime, ...]]:
    """Where the times come from, and the times."""
    import torch

    from dips.planner.run.device_times import MeasuringRounds, measure, name_of, own_parts, shipped_parts, torch_device

    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype {dtype} is not measured: choose float32 or bfloat16")
    place = torch_device(on)
    torch.set_num_threads(threads)
    if module is not None:
        parts, example = own_parts(module, setup.model.layers, place)
    else:
        parts, example = shipped_parts(setup.model, setup.training.sequence_tokens, place, getattr(torch, dtype))
    console = Console(stderr=True)
    with console.status(f"measuring {len(parts)} parts of {setup.model.name} on {on}"):
        layers = tuple(measure(parts, example, sizes, MeasuringRounds(rounds), kind))
    what = f"{module}" if module is not None else f"layers of {dtype}"
    return (
        f"dips profile device on {name_of(place)}, torch {torch.__version__}, {threads} threads, {what}, medians of "
        f"{rounds} rounds",
        layers,
    )


def _sizes(text: str | None, planned: int) -> list[int]:
    if text is None:
        return [planned, 2 * planned]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= MOST_SEQUENCES for word in words):
        raise ConfigError(f"--microbatch {text} is not a list of numbers: give 1 to {MOST_SEQUENCES}, such as 1,2,4")
    return sorted({int(word) for word in words})


@app.command(name="serve")
def serve_links(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the other machines reach this one.")],
    seconds: Annotated[float, typer.Option("--for", metavar="SECONDS", help="How long.")] = 600.0,
) -> int:
    """Answer the machines that measure their link to this one, for ten minutes.

    It takes and gives bytes of no meaning, one peer at a time, to whoever reaches the port: run it while links are
    measured, behind the firewall that the training's own ports have.
    """
    if not 0 < seconds <= MOST_SERVED_S:
        raise ConfigError(f"--for {seconds:g} is no time to serve: give more than 0, up to {MOST_SERVED_S:g} s")
    host, port = parse_address(listen, "--listen")
    with listening(host, port) as server:
        print(f"answering on {host}:{server.getsockname()[1]} for {seconds:g} s", flush=True)
        served = serve(server, time.monotonic() + seconds)
    print(f"answered {served} peers")
    return 0


@app.command()
def links(
    file: ProblemFile,
    here: Annotated[str, typer.Option("--from", metavar="SITE", help="The site where this runs.")],
    to: Annotated[
        list[str], typer.Option("--to", metavar="SITE=HOST:PORT", help="Another site, where dips profile serve runs.")
    ],
    out: Out = Path("profile.toml"),
    payload_mb: Annotated[float, typer.Option("--payload-mb", help="The large payload, 10^6 bytes.")] = 16.0,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds that count; the medians.")] = 7,
    warm_up: Annotated[int, typer.Option("--warm-up", metavar="N", help="Rounds before them.")] = 3,
    as_json: AsJson = False,
) -> int:
    """Measure both directions of the links between this site and others, over TCP connections.

    Run it at each site but the last with those that have not been measured yet, and merge the files: then all pairs
    are there. A round sends five integers and the large payload each way; bandwidth and latency are fitted to both.
    """
    _check_count("--rounds", rounds, 3, MOST_ROUNDS)
    _check_count("--warm-up", warm_up, 0, MOST_ROUNDS)
    large_bytes = round(payload_mb * 1e6) if 0 < payload_mb < 1e6 else 0
    if not 1000 <= large_bytes <= MOST_BYTES:
        raise ConfigError(f"--payload-mb {payload_mb:g} cannot be sent: give 0.001 to {MOST_BYTES / 1e6:.0f}")
    setup = read_setup(file, profiled=False)
    peers = _peers(setup, here, to)
    before = _existing(out, setup)
    rates: list[LinkRate] = []
    for site, (host, port) in peers.items():
        with Console(stderr=True).status(f"measuring the link between {here} and {site}"):
            sent, got = probe(host, port, large_bytes, rounds, warm_up)
        at = datetime.now(UTC).replace(microsecond=0)
        rates += [fit(sent, large_bytes, here, site, at), fit(got, large_bytes, site, here, at)]
    source = f"dips profile links at {here}, TCP, {format_bytes(large_bytes)}, medians of {rounds} rounds"
    profile = _written(out, before, ProfileFile(str(out), _head(setup, source), links=tuple(rates)))
    _tell(profile, out, as_json, _links_table(rates))
    return 0


def _peers(setup: ClusterFile, here: str, to: Iterable[str]) -> dict[str, tuple[str, int]]:
    names = [site.name for site in setup.sites]
    found: dict[str, tuple[str, int]] = {}
    for text in to:
        site, equals, address = text.partition("=")
        if not equals:
            raise ConfigError(f"--to {text} has no address: write SITE=HOST:PORT")
        found[site] = parse_address(address, f"--to {site}")
    for site in (here, *found):
        if site not in names:
            raise ConfigError(f"{setup.file}: {site!r} is no site; {nearest(site, names)}")
    if here in found:
        raise ConfigError(f"--to {here} is where this runs: name another site")
    return found


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="PROFILE...", help="Profiles of one model, later ones win.")],
    out: Annotated[Path, typer.Option(metavar="PROFILE", help="The profile of all their devices and links.")],
    as_json: AsJson = False,
) -> int:
    """Make one profile of those of several machines."""
    if len(files) < 2:
        raise ConfigError("dips profile merge takes at least two files: name another one")
    profile = merged([read_profile(file) for file in files], str(out))
    write_profile(profile, out)
    _tell(profile, out, as_json, *(table(rows) for table, rows in _shown(profile) if rows))
    return 0


def _shown(profile: ProfileFile) -> Iterable[tuple[Any, Sequence[Any]]]:
    return (_layers_table, profile.layers), (_links_table, profile.links)


# ---- file ------------------------------------------------------------------------------------------------------------


def _head(setup: ClusterFile, source: str) -> ProfileHead:
    return ProfileHead(
        source=source,
        at=datetime.now(UTC).replace(microsecond=0),
        model=setup.model.name,
        layers=setup.model.layers,
        sequence_tokens=setup.training.sequence_tokens,
    )


def _existing(out: Path, setup: ClusterFile) -> ProfileFile | None:
    """The profile to add to, checked before anything is measured."""
    if not out.exists():
        return None
    before = read_profile(out)
    merged([before, ProfileFile(setup.file, _head(setup, "this measurement"))], str(out))
    return before


def _written(out: Path, before: ProfileFile | None, new: ProfileFile) -> ProfileFile:
    profile = new if before is None else merged([before, new], str(out))
    profile = replace(profile, file=str(out))
    write_profile(profile, out)
    return profile


def _check_count(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{option} {value} cannot be: give {least} to {most}")


# ---- for people and programs -----------------------------------------------------------------------------------------


def _tell(profile: ProfileFile, out: Path, as_json: bool, *tables: Table) -> None:
    if as_json:
        print(json.dumps(to_json(profile)))
        return
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    for table in tables:
        console.print(table)
    spread = max([row.spread for row in profile.layers] + [row.spread for row in profile.links], default=0.0)
    if spread > UNSTEADY:
        console.print(
            f"measurements differ by up to {spread:.0%} of their median: something else uses this machine or link; "
            "measure again when it is idle, or with more --rounds",
            soft_wrap=True,
        )
    console.print(f"written: {out}", soft_wrap=True)


def to_json(profile: ProfileFile) -> dict[str, Any]:
    return {
        "measured": profile.head.model_dump(mode="json"),
        "layers": [row.model_dump(mode="json") for row in profile.layers],
        "links": [row.model_dump(mode="json") for row in profile.links],
        "calibration": None if profile.calibration is None else profile.calibration.model_dump(mode="json"),
    }


def _layers_table(layers: Sequence[LayerTime]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("device", "part", "layers", "sequences", "forward", "input gradient", "weight gradient", "spread"):
        table.add_column(name, justify="left" if name in ("device", "part") else "right")
    for row in layers:
        last = row.layer + row.count - 1
        which = "-" if row.part != "layer" else f"{row.layer}" if last == row.layer else f"{row.layer} to {last}"
        times = (f"{time_ms:.4g} ms" for time_ms in row.times_ms)
        table.add_row(row.device, row.part, which, str(row.microbatch_sequences or "any"), *times, f"{row.spread:.1%}")
    return table


def _links_table(links: Sequence[LinkRate]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("from", "to", "bandwidth", "latency", "spread"):
        table.add_column(name, justify="left" if name in ("from", "to") else "right")
    for row in links:
        bandwidth, latency = f"{row.bandwidth_gbps:.4g} Gbit/s", f"{row.latency_ms:.4g} ms"
        table.add_row(row.sender, row.receiver, bandwidth, latency, f"{row.spread:.1%}")
    return table
