"""SpanTrain (Wang et al.): Figure 5 and the settings of section 4.1, grouped; Figure 6, the compact order."""

from __future__ import annotations

from collections.abc import Iterator

from dips.planner.cluster import read_setup
from dips.planner.costs import NS
from dips.planner.grouping import group, measured_of
from dips.planner.simulate import simulate
from dips.planner.sweep import ACTIVATION, Case
from dips.planner.validate import peaks
from dips.planner.validation.checks import PaperCheck, holds


def spantrain_checks() -> Iterator[PaperCheck]:
    yield from figure_5()
    yield from figure_6()


FIGURE_5 = (
    "SpanTrain, section 3.2.2 (Figure 5) and the settings of section 4.1, grouped; 1 where the statement holds\n"
    "assumed: which devices and links make Figure 5, latencies, links inside a server, peak rates in place of times\n"
    "(the sources in the shipped files spantrain-figure-5, -setting-1 and -setting-2 say each). No threshold is in\n"
    "the paper: 0.25 Gbit/s lies between what the settings set apart and what they do not, so their groups are no\n"
    "prediction. The text does not say the groups of the settings; its networks suggest those below. Figure 12\n"
    "spreads a model over 4 first-level groups in setting 1, whose networks have two speeds alone: this does not agree"
)


def figure_5() -> Iterator[PaperCheck]:
    names = ("spantrain-figure-5", "spantrain-setting-1", "spantrain-setting-2")
    figure, first, second = map(_grouped, names)
    sizes = [sorted(len(devices) for devices in subgroups) for subgroups in figure]
    yield PaperCheck(FIGURE_5, "first-level groups of 12 devices", 3, len(sizes), 3, 3)
    yield PaperCheck(FIGURE_5, "subgroups of FG1", 3, len(sizes[0]), 3, 3)
    yield holds(FIGURE_5, "FG2 keeps all devices single", set(sizes[1]) == {1})
    yield holds(FIGURE_5, "FG3 has one subgroup and two single devices", sizes[2][:2] == [1, 1] and sizes[2][2] > 1)
    parted = [{name.partition("-")[0] for devices in subgroups for name in devices} for subgroups in first]
    yield holds(FIGURE_5, "setting 1: two groups, the cloud, and edge with end", parted == [{"cloud"}, {"edge", "end"}])
    yield PaperCheck(FIGURE_5, "setting 1: first-level groups, as in Figure 12", 4, len(first))
    yield holds(FIGURE_5, "setting 2: one group, since all networks are alike", len(second) == 1)


def _grouped(name: str) -> list[list[list[str]]]:
    """For each group and each of its subgroups, the site of each device."""
    measured = measured_of(read_setup(name))
    return [
        [[measured.sites[part.site] for part in inner.parts for _ in range(part.devices)] for inner in one.subgroups]
        for one in group(measured).groups
    ]


FIGURE_6 = (
    "SpanTrain, section 3.3.1 (Figure 6): 4 first-level groups, 6 microbatches; 1 where the paper's statement holds\n"
    "assumed: a device for each group, T_F = T_D = T_W, equal links, latencies and times on a link of 0 to 6 T_F in\n"
    "steps of 0.5; the original zero-bubble order is ZB-H1, whose warm-up is 1F1B's. A link is taken to be slow\n"
    "where a message takes half of T_F or more, found by a scan; at less the compact order is longer. Weights change\n"
    "at the end of an iteration, so both orders equal synchronous training; the paper's own updates are out of order\n"
    "and do NOT equal it: they are not computed here"
)


def figure_6() -> Iterator[PaperCheck]:
    steps = [0.5 * step for step in range(13)]
    slow = {(lat, busy): _both(lat, busy) for lat in steps for busy in steps if lat or busy}
    never = all(compact <= original for compact, original in slow.values())
    shorter = all(compact < original for (lat, busy), (compact, original) in slow.items() if lat + busy >= 1)
    yield holds(FIGURE_6, "the compact order is never longer over slow links", never)
    yield holds(FIGURE_6, "and shorter where a message takes T_F or more", shorter)
    first = next(lat / 4 for lat in range(25) if _both(lat / 4, 0)[0] < _both(lat / 4, 0)[1])
    yield PaperCheck(FIGURE_6, "latency from which it is shorter, in steps of 0.25 T_F", None, first)
    schedule, costs = Case(4, 6, 4, 1, 0, 1.5).schedule("compact_zb")
    held = max(peaks(schedule, costs)) / ACTIVATION
    yield PaperCheck(FIGURE_6, "microbatches that the first group holds (all, before its first D)", 6, held, 6, 6)
    compact, original = _both(0, 0)
    what = f"never longer without delay either: compact {compact:g}, ZB-H1 {original:g}"
    yield PaperCheck(FIGURE_6, what, None, float(compact <= original))
    compact, original = _both(2, 0, memory=1)
    what = f"never longer in 1F1B's memory, latency 2 T_F: compact {compact:g}, ZB-H1 {original:g}"
    yield PaperCheck(FIGURE_6, what, None, float(compact <= original))


def _both(latency: float, bandwidth: float, memory: float = 1.5) -> tuple[float, float]:
    """The makespans of the compact order and of ZB-H1, in T_F. memory: 1.5 holds all 6 microbatches."""
    case = Case(4, 6, 4, latency, bandwidth, memory)
    compact, original = (simulate(*case.schedule(name)).makespan_ns / NS for name in ("compact_zb", "zb_h1"))
    return compact, original


# ---- the planner, section 4 ----

SECTION_4 = (
    "SpanTrain, sections 4.2 and 4.3: GPT-2 in settings 1 and 2, planned; 1 where the paper's statement holds\n"
    "assumed before any comparison: the shipped files spantrain-setting-1 and -2 (GPT-2 with 124M parameters, 512\n"
    "tokens, 16-bit messages and gradients, compute at the FP16 rates of the paper's Table 2); all sizes of\n"
    "microbatches that divide the batch; two groups talk over one link, the slowest between them. Peers: DDP is an\n"
    "even share of the batch on each of the 22 GPUs, the slowest of them, then a ring all-reduce of all gradients over\n"
    "the slowest link, which nothing hides; DeepSpeed Pipeline is 1F1B and GPipe is GPipe, both with one GPU and an\n"
    "even part of the layers on each of the 10 servers, in the order of the file, with the file's microbatches of 32.\n"
    "No second level: the devices of a group share its layers with even parts of each microbatch. FSDP, Alpa, Metis,\n"
    "HetPipe and Asteroid are not modelled, nor are ResNet-101, EfficientNet and BERT-small"
)
