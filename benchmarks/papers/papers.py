"""The five papers: each figure and table, and why there is no number of ours for some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dips.core.errors import DipsError
from papers import di_ps, planning
from papers.source import Source

DRAWING = "a drawing of the design: nothing to measure"
INPUT = "an input: the shipped set-ups hold its numbers"
UNSAID = "drawn without numbers, and its setting is not in the text"
TRACES = "its in-house traces are not published"
PACKETS = "packets are not simulated"
HARDWARE = "measured on accelerators that no machine here has, and not described well enough to compute"


@dataclass(frozen=True)
class Place:
    """A figure, a table, or a section with numbers of its own. without: why there is no number of ours."""

    name: str
    shows: str
    without: str = ""


@dataclass(frozen=True)
class Paper:
    name: str
    title: str
    about: str
    places: tuple[Place, ...]
    sources: tuple[Source, ...]

    def place(self, name: str) -> Place:
        """Figure 2 for Figure 2a, too. Raises DipsError."""
        for place in self.places:
            if name in (place.name, f"{place.name}a", f"{place.name}b"):
                return place
        raise DipsError(f"{self.name} has no {name}: add it to its places")


DI_PS = Paper(
    "di-ps",
    "Di-PS: System-Algorithm Co-Design for Asynchronous and Heterogeneous Cross-cluster LLM Training at Scale",
    "An asynchronous parameter server between training clusters: what this project is built after.",
    (
        Place("Table 1", "clusters of the production run, and how often they fail"),
        Place("Figure 1", "two-stage training over clusters", DRAWING),
        Place("Figure 2", "a: communication of four clusters, one with a slower link; b: naive asynchronous training"),
        Place("Figure 3", "overview", DRAWING),
        Place("Figure 4", "communication architectures", DRAWING),
        Place("Figure 5", "the schedule of transfers between clusters and slaves"),
        Place("Figure 6", "gRPC against ZeroMQ, and several threads"),
        Place("Figure 7", "loss of Di-PS with clusters of unequal speed"),
        Place("Figure 8", "which clusters were there in 33 days"),
        Place("Figure 9", "throughput, by the fourth cluster's bandwidth"),
        Place("Figure 10", "weak scaling"),
        Place("Figure 11", "time in communication"),
        Place("Figure 12", "loss by the number of inner steps"),
        Place("Figure 13", "what the optimizations of the slaves are worth"),
        Place(
            "Figure 14", "loss and throughput of the production run",
            "2.3 trillion tokens of a model of 100 billion parameters: no machine here trains it",
        ),
        Place("Table 2", "push, update and pull of the production run"),
        Place(
            "Figure 15", "what slaves do in a day",
            "drawn without numbers, but for idle over 95 % of the time, which follows from Table 2 and Figure 16",
        ),
        Place("Figure 16", "network traffic of a slave in six hours"),
        Place("Figure 17", "downtime, and what part Di-PS has in it"),
        Place("Section 5.4", "the production run as a whole"),
    ),
    di_ps.SOURCES,
)  # fmt: skip

JEEVES = Paper(
    "jeeves",
    "JEEVES: The Valet Who Masters the Art of Cross-DC Training Scheduling",
    "Schedules of pipelines over two datacenters: `dips plan` makes them.",
    (
        Place("Figure 1", "parallelism of language models", DRAWING),
        Place("Figure 2", "virtual pipelines and DualPipe", DRAWING),
        Place("Figure 3", "iteration time of GPT-3 by bandwidth", UNSAID),
        Place("Figure 4", "the steps of the optimization"),
        Place("Figure 5", "replicas that share a link", DRAWING),
        Place("Figure 6", "the schedule that it makes"),
        Place("Figure 7", "iteration time over DAPPLE, and over one site"),
        Place("Text", "numbers in sections 2 and 4"),
    ),
    planning.JEEVES,
)  # fmt: skip

CROSSPIPE = Paper(
    "crosspipe",
    "CrossPipe: Towards Optimal Pipeline Schedules for Cross-Datacenter Training",
    "A model of pipelines over slow links, and schedules by a solver and a greedy: `dips plan` has both.",
    (
        Place("Table 1", "symbols", DRAWING),
        Place("Figure 1", "time of a message", DRAWING),
        Place("Figure 2", "infrastructures", INPUT),
        Place("Table 2", "models", INPUT),
        *(Place(f"Figure {n}", "how schedules and their model are built", DRAWING) for n in (3, 4, 5, 6, 7)),
        Place("Table 3", "static schedules", INPUT),
        Place("Figure 8", "schedules by latency and bandwidth"),
        Place("Figure 9", "pipelines or replicas over two sites"),
        Place("Figure 10", "components", DRAWING),
        Place("Figure 11", "measured schedules of M8 and M70", f"{UNSAID}; Tables 5 and 6 hold M70"),
        Place("Table 4", "models", INPUT),
        Place("Table 5", "seconds of a microbatch, two sites"),
        Place("Table 6", "seconds of a microbatch, four sites"),
        Place("Figure 12", "more stages or more replicas"),
        Place("Figure 13", "a backward pass in two parts", DRAWING),
        Place("Figure 14", "solvers' times", "of commercial solvers, on 128 cores"),
        Place("Figure 15", "where bubbles are", DRAWING),
        Place("Figure 16", "how delays are injected", DRAWING),
        Place("Figure 17", "whether they are", HARDWARE),
    ),
    planning.CROSSPIPE,
)  # fmt: skip

SPANTRAIN = Paper(
    "spantrain",
    "SpanTrain: Highly Efficient Cross-domain Model Distributed Training System under Heterogeneous GPUs and Networks "
    "in CEE Environment",
    "Groups of devices that belong together, a compact order, and pieces of microbatches for bad links.",
    (
        Place("Figure 1", "the environment", DRAWING),
        Place("Figure 2", "other systems in a real environment", HARDWARE),
        Place("Table 1", "devices", INPUT),
        Place("Table 2", "their speeds", INPUT),
        Place("Figure 3", "the difficulties", DRAWING),
        Place("Figure 4", "components", DRAWING),
        Place("Figure 5", "groups of devices"),
        Place("Figure 6", "the compact order"),
        Place("Figure 7", "parts of a batch for unequal devices"),
        Place("Figure 8", "the adapter"),
        Place("Figure 9", "throughput over other systems"),
        Place("Figure 10", "time until an accuracy", "with updates out of order, which are not made here"),
        Place("Figure 11", "throughput without the second level, and the search's time"),
        Place("Figure 12", "the adapter while bandwidth is lost"),
        Place("Figure 13", "throughput by the number of devices", HARDWARE),
    ),
    planning.SPANTRAIN,
)  # fmt: skip

SCALEACROSS = Paper(
    "scaleacross",
    "ScaleAcross Explorer: Exploring Communication Optimization for Scale-Across AI Model Training",
    "Which dimension of parallelism goes over the links between buildings: `dips plan explore` searches.",
    (
        Place("Figure 1", "infrastructure", DRAWING),
        Place("Figure 2", "overview", DRAWING),
        Place("Figure 3", "schedules of a pipeline", DRAWING),
        Place("Table 1", "oversubscription of the testbed", INPUT),
        Place("Table 2", "models", INPUT),
        Place("Figure 4", "17B dense: pipeline or replicas outermost, by bandwidth"),
        Place("Figure 5", "the same by the size of the batch"),
        Place("Figure 6", "100K accelerators: the same"),
        Place("Figure 7", "40B MoE by the number of experts"),
        Place("Figure 8", "40B MoE by bandwidth"),
        *(
            Place(f"Figure {n}", "simulations with other experts and topologies", TRACES)
            for n in (9, 10, 11, 12, 13, 14)
        ),
        Place("Table 3", "simulated topologies", TRACES),
        Place("Figure 15", "HSDP against FSDP"),
        Place("Figure 16", "interleaved ZBV against DoraPP"),
        Place("Figure 17", "NCCL by distance; larger chunks"),
        Place("Figure 18", "lost packets"),
        Place("Figure 19", "unequal latencies", TRACES),
        Place("Figure 20", "load balancing in the network", f"{PACKETS}; a formula is under Text"),
        Place("Figure 21", "congestion control", PACKETS),
        Place("Figure 22", "workflow", DRAWING),
        Place("Figure 23", "40B MoE: time saved over production's configuration"),
        Place("Figure 24", "17B dense: time saved"),
        Place("Figure 25", "100K accelerators: time saved"),
        Place("Figure 26", "100K accelerators: Sailor over Explorer"),
        Place("Figure 27", "how distances are emulated", DRAWING),
        Place("Text", "formulas in sections 3.1 and 5"),
    ),
    planning.SCALEACROSS,
)  # fmt: skip

PAPERS: Mapping[str, Paper] = {paper.name: paper for paper in (DI_PS, JEEVES, CROSSPIPE, SPANTRAIN, SCALEACROSS)}

ONLY_HERE: tuple[tuple[str, str], ...] = (
    ("A checker proves from a run's records that each push counts once or not at all", "dips verify runs/demo"),
    ("Thousands of small runs with every fault, each the same again bit for bit", "dips simulate --seeds 200"),
    ("Killed masters and slaves go on, killed clusters join again", "dips demo"),
    ("Clusters train through push, wait and pull; a table shows the cost in loss", "dips compare --seeds 1,2,3"),
    ("Pushes and pulls in 16, 8 or 4 bits, with error feedback on both sides", "dips master --help"),
    ("Keys for each process, mutual TLS on control and data, revocation in the run", "dips keys --help"),
    ("The model moves to other slaves while the run goes on", "dips reshard --help"),
    ("A run over Kubernetes clusters from one file, with no rights beyond its namespaces", "dips deploy --help"),
    ("A planned schedule runs as real processes, and is compared with the plan", "dips plan run zb_v --ranks 4"),
    (
        "Memory, disk and time of a run before it begins, with formulas",
        "dips size --params 7B --clusters 4 --slaves 2 --link 10gbps",
    ),
)
"""What this project does and none of the five papers, with a command that shows it."""
