"""The commands whose numbers are compared with those of the Di-PS paper."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dips.lab.compare.pictures import draw_bars
from papers.findings import Finding, Kind, Told, Value
from papers.source import ROLES, Picture, Source

COMPARED = (*ROLES, "judge", "lab", "trainer")
SIMULATED = (*ROLES, "judge", "lab/sim")
RUN_DIR = ("--run-dir", "{folder}")

OUTER_STEP = "outer rate 0.7 and momentum 0.8, the preset dynamic's"
SMALL = (
    f"the paper trains LLaMA3.2-1B; here a byte model of 0.36 million parameters on Python's own texts; {OUTER_STEP}"
)
LARGER = (
    f"a byte model of 10.7 million parameters on Python's own texts, with fewer of the figure's lines; {OUTER_STEP}"
)
DYNAMIC = ("--outer-lr", "0.7", "--outer-momentum", "0.8")
"""The losses were made with the outer step of the preset dynamic, which was the default then."""
RATES = "ratios of one machine, whose links the kernel shapes; the paper has 1 to 10 Gbit/s"
COMPUTE = (
    "communication is measured; throughput follows from it by arithmetic, for inner loops of four times a push and a "
    "pull over equal links, with gaps of 0, 16, 33 and 50 %"
)
STEP_TIMES = "step times and the two middle speeds are fitted to ratios that the paper prints"
TABLE_2 = "rates of push, update and pull are fitted to the paper's Table 2, speeds and failure rates to Table 1"


# ---- dips compare ----


def _losses(name: str, model: str) -> Callable[[Told], Iterator[Finding]]:
    def found(told: Told) -> Iterator[Finding]:
        place = f"Figure {name}"
        yield Finding(place, "what the losses say", told["paper"]["statement"], told["here"], assumption=model)
        for label, line in told["lines"].items():
            loss = line["loss_mean"]
            ours = "not finite" if loss is None else float(loss)
            yield Finding(place, f"{label}: loss at the end", None, ours, "nats a byte", assumption=model)

    return found


def _losses_source(name: str) -> Source:
    picture = Picture(f"Figure {name}", f"figure-{name}.png", "Held-out loss in nats per byte over tokens")
    return Source(
        f"losses-{name}", ("compare", "--figure", name, *DYNAMIC), _losses(name, SMALL), COMPARED,
        quick=("--tokens", "98k"), files=RUN_DIR, pictures=(picture,),
    )  # fmt: skip


def _larger_source(name: str) -> Source:
    """Hours; the figures share a folder, since they share runs."""
    caption = "Held-out loss in nats per byte over tokens, the larger model"
    picture = Picture(f"Figure {name}", f"../larger/figure-{name}.png", caption)
    return Source(
        f"larger-{name}", ("compare", "--figure", name, "--setup", "larger", *DYNAMIC), _losses(name, LARGER),
        COMPARED,
        files=("--run-dir", "{folder}/../larger"), pictures=(picture,), only_full=True,
    )  # fmt: skip


SAFE, DEFAULTS = "preset safe (as the paper describes)", "the defaults"


def _speeds_9(told: Told) -> Iterator[Finding]:
    published = {"emulated": ((1.23, 1.38), (2.03, 10.35)), "real": ((2.87, 2.93), (1.15, 2.51))}
    for setup, (over_diloco, over_dp) in published.items():
        gains = {name: one["over_synchronous"] for name, one in told["setups"][setup]["methods"].items()}
        for name, which in (("safe", SAFE), ("dips", DEFAULTS)):
            what = f"{setup} clusters, 1 to 10 Gbit/s: times as fast as synchronous DiLoCo, {which}"
            yield Finding(
                "Figure 9", what, over_diloco, _ends(gains[name]), "x", assumption=STEP_TIMES, kind=Kind.FITTED
            )
        over = [ring / parallel for ring, parallel in zip(gains["ring-diloco"], gains["dp"], strict=True)]
        what = f"{setup} clusters: synchronous DiLoCo over data parallel"
        yield Finding("Figure 9", what, over_dp, _ends(over), "x", assumption=STEP_TIMES, kind=Kind.FITTED)


def _speeds_10(told: Told) -> Iterator[Finding]:
    methods = told["setups"]["weak-scaling"]["methods"]
    for name, what in (("safe", SAFE), ("dips", DEFAULTS)):
        shares = methods[name]["share_of_ideal"][1:]
        yield Finding(
            "Figure 10",
            f"2 to 7 clusters, of ideal, {what}",
            (0.982, 0.986),
            _ends(shares),
            "%",
            None,
            STEP_TIMES,
            Kind.FITTED,
        )
    last = methods["dips"]["over_synchronous"][-1]
    yield Finding(
        "Figure 10", "7 clusters: times as fast as synchronous DiLoCo, the defaults", 5.74, last, "x", None,
        "the slowest clusters' speeds are fitted to this number", Kind.FITTED,
    )  # fmt: skip


def _speeds_source(name: str, setups: tuple[str, ...], found: Callable[[Told], Iterator[Finding]]) -> Source:
    pictures = tuple(
        Picture(
            f"Figure {name}", f"figure-{name}-{setup}.png",
            f"Tokens a second in percent of ideal, {setup.replace('-', ' ')}",
        )
        for setup in setups
    )  # fmt: skip
    return Source(
        f"speeds-{name}", ("compare", "--figure", name), found, COMPARED, ("--rounds", "6"), files=RUN_DIR,
        pictures=pictures,
    )  # fmt: skip


# ---- dips simulate ----


CAUSED = ("join", "pull after a failure")


def _month(told: Told) -> Iterator[Finding]:
    def fitted(place: str, what: str, published: Value | None, ours: float, unit: str = "") -> Finding:
        return Finding(place, what, published, ours, unit, assumption=TABLE_2, kind=Kind.FITTED)

    days, failures, part = told["hours"] / 24, told["failures"], told["hours"] / (24 * 33)
    yield fitted("Table 1", f"failures of clusters in {days:g} days", 41 * part, float(failures.get("cluster", 0)))
    servers = float(failures.get("slave", 0) + failures.get("master", 0))
    yield fitted("Section 5.4", f"failures of servers in {days:g} days", 4 * part, servers)
    yield fitted("Section 5.4", f"tokens in {days:g} days", 2.3e12 * part, float(told["tokens"]))
    yield Finding(
        "Table 2", "push, update and pull, of the time that clusters took part", 0.06, told["overhead_total"], "%",
        assumption="not a fit: it follows from the rates, the grace window and rounds in progress",
    )  # fmt: skip
    for name in ("push", "verdict wait", "pull", "copies"):
        yield fitted("Table 2", f"of these: {name}", None, told["overhead"].get(name, 0.0), "%")
    downtime_s = told["downtime_s"]
    ours, whole = sum(downtime_s.get(name, 0.0) for name in CAUSED), sum(downtime_s.values())
    what = f"of all downtime, what Di-PS causes ({', '.join(CAUSED)})"
    yield fitted("Figure 17", what, "minimal; drawn without numbers", ours / whole if whole else 0.0, "%")
    worst = max(told["clusters"], key=lambda cluster: sum(cluster["downtime_s"].values()))
    share = sum(worst["downtime_s"].values()) / (3600 * told["hours"])
    what = f"the most downtime of a cluster ({worst['id']}), of its time"
    yield fitted("Figure 17", what, "the clusters with most failures; drawn without numbers", share, "%")
    yield fitted("Figure 16", "clusters merged in a round, mean", "pushes come one by one", told["merged_mean"])


def _month_defaults(told: Told) -> Iterator[Finding]:
    yield Finding(
        "Table 2", "the same run with the defaults: push, update and pull, of the time that clusters took part", 0.06,
        told["overhead_total"], "%", assumption="clusters train while they push, wait and pull",
    )  # fmt: skip


def _month_source(name: str, found: Callable[[Told], Iterator[Finding]], picture: bool) -> Source:
    caption = "Accelerators that take part over the days, cluster upon cluster"
    files = ("--picture", "{folder}/resources.png") if picture else ()
    pictures = (Picture("Figure 8", "resources.png", caption),) if picture else ()
    return Source(name, ("simulate", name), found, SIMULATED, ("--hours", "72"), files=files, pictures=pictures)


# ---- benchmarks ----


def _spread(row: Mapping[str, Any], told: Told) -> float | None:
    """Of what was measured more than once."""
    return float(row["spread"]) if told["options"]["repeats"] > 1 else None


def _link(row: Mapping[str, Any]) -> str:
    """As in "fourth link 0.5"."""
    return str(row["what"]).partition(", ")[2]


def _links(told: Told) -> Iterator[Finding]:
    rows = [row for row in told["rows"] if row["part"] == "mixed" and row["ratios"]]
    spread = _spread(max(rows, key=lambda row: row["spread"]), told)
    ratios = {key: [row["ratios"][key] for row in rows] for key in rows[0]["ratios"]}
    growing = ratios["figure_2a_ring_over_dips"]
    for row, ratio in zip(rows, growing, strict=True):
        yield Finding(
            "Figure 2a", f"a ring's time over the mean of push and pull, {_link(row)} of the others'", None, ratio, "x",
            _spread(row, told), RATES,
        )  # fmt: skip
    yield Finding(
        "Figure 2a", "what the times say", "degradation in the decentralized architecture becomes more significant as "
        "network heterogeneity increases", "it does" if growing == sorted(growing) else "it does not",
    )  # fmt: skip
    for key, what, published, place in (
        (
            "figure_9_over_sync",
            "times as fast as clusters that wait for each other around a ring",
            (1.23, 1.38),
            "Figure 9",
        ),
        ("figure_9_over_async", "times as fast as clusters that do not wait, around a ring", (1.00, 1.16), "Figure 9"),
        ("figure_11_async_over_dips", "communication of asynchronous DiLoCo over Di-PS's", (1.06, 3.07), "Figure 11"),
    ):
        what = f"{what}, the fourth link at 1 to 1/10 of the others'"
        yield Finding(place, what, published, _ends(ratios[key]), "x", spread, f"{RATES}; {COMPUTE}")


def _order(told: Told) -> Iterator[Finding]:
    rows = {row["what"]: row for row in told["rows"] if row["part"] == "slow"}
    for way in ("push", "pull"):
        for method in ("scheduled", "naive order"):
            row = rows[f"{way} {method}"]
            what = f"{way}, {method}: fast clusters' time over what they take alone, one link ten times slower"
            yield Finding("Figure 5", what, None, row["ratios"]["fast_mean"], "x", _spread(row, told), RATES)


def _draw_links(told: Told, folder: Path) -> None:
    rows = [row for row in told["rows"] if row["part"] == "mixed" and row["ratios"]]
    parts = [row["what"].rpartition(" ")[2] for row in rows]
    labels = {
        "figure_2a_ring_over_dips": "ring over push and pull (2a)",
        "figure_9_over_sync": "throughput over synchronous (9)",
        "figure_11_async_over_dips": "communication, ring over Di-PS (11)",
    }
    series = [(label, [row["ratios"][key] for row in rows]) for key, label in labels.items()]
    groups = [f"fourth link\n{part} of the others'" for part in parts]
    draw_bars(folder / "mixed.png", groups, series, "ratio", "Four clusters, one with a slower link: a ring and Di-PS")


def _ablation(told: Told) -> Iterator[Finding]:
    flows = told["flows"]
    rates = {(flow["way"], flow["megabytes"], flow["streams"]): flow["gbytes_per_s"] for flow in flows}
    sizes = sorted({flow["megabytes"] for flow in flows})
    streams = sorted({flow["streams"] for flow in flows})
    spread = max(flow["spread"] for flow in flows)
    where = "over loopback, without the network card of the paper's 25 Gbit/s"
    one = statistics.mean(rates["ZeroMQ", size, streams[0]] / rates["gRPC", size, streams[0]] for size in sizes)
    yield Finding("Figure 6", "ZeroMQ over gRPC, one stream, mean of all sizes", 1.74, one, "x", spread, where)
    more = statistics.mean(
        max(rates["ZeroMQ", size, n] for n in streams) / rates["ZeroMQ", size, streams[0]] for size in sizes
    )
    yield Finding(
        "Figure 6", "the best number of streams, with a thread each, over one", 1.41, more, "x", spread, where
    )
    rounds = {row["off"]: row for row in told["rounds"]}
    for name, (published, note) in OPTIMIZATIONS.items():
        row = rounds[name]
        what = f"a whole round without {name} ({row['what_instead']}) over one with everything"
        yield Finding("Figure 13", what, published, row["times_all_on"], "x", row["spread"], note)


OPTIMIZATIONS: Mapping[str, tuple[float | None, str]] = {
    "pipelining": (1.49, "the paper's number is of serialization alone, and an “up to”"),
    "threads": (1.41, "the paper's number is of communication alone, with its schedule, and an “up to”"),
    "pipelining, threads": (1.16, "the paper's number is of all its optimizations, on a link of 10 Gbit/s"),
    "sharding": (None, ""),
    "async snapshots": (None, ""),
}


def _draw_flows(told: Told, folder: Path) -> None:
    flows = told["flows"]
    sizes = sorted({flow["megabytes"] for flow in flows})
    kinds = dict.fromkeys((flow["way"], flow["streams"]) for flow in flows)
    series = [
        (
            f"{way}, {streams} stream{'s' if streams > 1 else ''}",
            [flow["gbytes_per_s"] for flow in flows if (flow["way"], flow["streams"]) == (way, streams)],
        )
        for way, streams in kinds
    ]
    groups = [f"{size} MB" for size in sizes]
    draw_bars(folder / "flows.png", groups, series, "GB/s", "One vector from process to process, by size")


def _ranks(told: Told) -> Iterator[Finding]:
    rows: list[Mapping[str, Any]] = told["results"]
    last = rows[-1]
    where = "FSDP ranks, each behind a link of its own; the paper's clusters 6 to 8 have more pipeline stages"
    for way, published in (("push", 195 / 60), ("pull", 135 / 67)):
        what = f"{way} of 1 rank over {last['ranks']} ranks (there: Cluster A over Cluster C)"
        yield Finding("Table 2", what, published, last[f"{way}_faster"], "x", None, where)


def _scaling(told: Told) -> Iterator[Finding]:
    rows = [row for row in told["results"] if row["clusters"] > 1]
    shares = [row["share_of_ideal"] for row in rows]
    numbers = " to ".join(dict.fromkeys(str(row["clusters"]) for row in (rows[0], rows[-1])))
    setting = told["setting"]
    where = (
        f"inner loops of {setting['sync_every'] * setting['step_ms'] / 1000:g} s, of timed steps, on "
        f"{setting['cpus']} processors; the paper's take an hour or two"
    )
    spread = max(row["spread"] for row in rows) if setting["repeats"] > 1 else None
    what = f"{numbers} clusters that wait for each exchange, of ideal, {SAFE}"
    yield Finding("Figure 10", what, (0.982, 0.986), _ends(shares), "%", spread, where)


def _draw_scaling(told: Told, folder: Path) -> None:
    rows = told["results"]
    series = [("share of ideal", [100 * row["share_of_ideal"] for row in rows])]
    groups = [str(row["clusters"]) for row in rows]
    draw_bars(folder / "scaling.png", groups, series, "% of ideal", "Steps a second of all clusters, by their number")


def _calibration(told: Told) -> Iterator[Finding]:
    for cell in told["cells"]:
        real = next(row for row in cell["rows"] if row["measure"] == "share_of_ideal")
        spread = real["spread"] / real["real"] if len(cell["runs"]) > 1 else None
        clusters = f"{told['setting']['clusters']} clusters, {CALIBRATED[cell['case']]}"
        yield Finding("Figure 10", f"{clusters}: share of ideal, the defaults", None, real["real"], "%", spread)
        yield Finding(
            "Figure 10", f"{clusters}: the same run simulated, its share over the measured one", None,
            real["simulated"] / real["real"], "x", spread,
            "rates of links, copies, disks and the outer step are measured before and given to the simulation",
            Kind.SIMULATED,
        )  # fmt: skip


CALIBRATED = {"equal-defaults": "equal", "gaps-defaults": "gaps of 0 to 50 %"}


def _goodput(told: Told) -> Iterator[Finding]:
    cells = {cell["system"]: cell for cell in told["cells"]}
    setting = told["setting"]
    where = (
        f"{setting['clusters']} clusters, {setting['params'] / 1e6:g}M parameters, {setting['inner_steps']} inner "
        f"steps of {setting['step_s']:g} s or more, each link {setting['bits_per_s'] / 1e9:g} Gbit/s"
    )
    what, ours, base = "gaps of 0, 16, 33 and 50 %", cells["dips"]["score"]["share"], cells["plain"].get("score")
    gain = ours / base["share"] if base else f"the plain server cannot: {cells['plain']['cannot']}"
    yield Finding(
        "Figure 9", f"{what}: tokens over those of a plain synchronous server", (1.23, 1.38), gain, "x", None, where
    )
    yield Finding("Figure 9", f"{what}: share of ideal tokens, the defaults", None, ours, "%", None, where)


def _ends(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


SOURCES = (
    Source(
        "links", ("bench_links.py", "--parts", "mixed"), _links, ROLES, quick=("--mib", "8", "--repeats", "1"),
        pictures=(Picture("Figure 2a", "mixed.png", "Ratios of measured times, by the fourth link's rate"),),
        draw=_draw_links,
    ),
    Source("order", ("bench_links.py", "--parts", "slow"), _order, ROLES, quick=("--mib", "8", "--repeats", "1")),
    Source(
        "ablation", ("bench_ablation.py",), _ablation, ROLES,
        quick=(
            *("--params", "20_000_000", "--rounds", "2", "--cycles", "1", "--megabytes", "16", "64", "--repeats", "3"),
            *("--streams", "1", "4", "--rows", *OPTIMIZATIONS),
        ),
        pictures=(Picture("Figure 6", "flows.png", "Rate of one vector over gRPC and ZeroMQ, in GB/s"),),
        draw=_draw_flows,
    ),
    Source("ranks", ("bench_ranks.py",), _ranks, ROLES, quick=("--ranks", "1,4", "--params", "20e6", "--rounds", "2")),
    Source(
        "scaling", ("bench_scaling.py", "--kinds", "even"), _scaling, ROLES,
        quick=("--clusters", "1", "4", "--seconds", "18", "--repeats", "1"),
        full=("--clusters", "1", "2", "3", "4", "5", "6", "7"),
        pictures=(Picture("Figure 10", "scaling.png", "Steps a second, percent of ideal, by the number of clusters"),),
        draw=_draw_scaling,
    ),
    Source(
        "calibration", ("bench_simulation.py",), _calibration, (*ROLES, "lab/sim"),
        quick=("--cases", "equal-defaults", "--rounds", "2", "--repeats", "1", "--inner-steps", "32"),
        full=("--cases", ",".join(CALIBRATED)),
    ),
    Source(
        "goodput", ("bench_goodput.py", "--systems", "dips,plain", "--conditions", "b"), _goodput, ROLES,
        quick=("--rounds", "2", "--inner-steps", "16", "--step-s", "0.25"),
    ),
    _losses_source("2b"), _losses_source("7"), _losses_source("12"),
    _larger_source("2b"), _larger_source("7"), _larger_source("12"),
    _speeds_source("9", ("emulated", "real"), _speeds_9), _speeds_source("10", ("weak-scaling",), _speeds_10),
    _month_source("paper-33-days", _month, True), _month_source("defaults-33-days", _month_defaults, False),
)  # fmt: skip
