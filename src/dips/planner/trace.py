"""Writes a timeline in Chrome's trace format, which Perfetto (ui.perfetto.dev) opens, and as a drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dips.planner.ir import Kind, Op
from dips.planner.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {Kind.F: "#56B4E9", Kind.D: "#E69F00", Kind.W: "#009E73", Kind.B: "#D55E00"}
"""The colours of Okabe and Ito, which colour-blind people can distinguish."""

LINK_COLOUR, EXCHANGE_COLOUR = "#999999", "#CC79A7"
_INCHES_WIDE = 12.0
_MOST_LABELS = 700


def trace_events(timeline: Timeline, names: Sequence[str] = ()) -> dict[str, Any]:
    """The events of the trace format: a process for each device with its operations, and one for links; times in
    microseconds. names[d]: name of device d."""
    events: list[dict[str, Any]] = []
    n = timeline.schedule.n_devices
    for device in range(n):
        name = names[device] if names else f"device {device}"
        events.append({"ph": "M", "name": "process_name", "pid": device, "args": {"name": name}})
    events.append({"ph": "M", "name": "process_name", "pid": n, "args": {"name": "links"}})
    pairs = sorted({(message.source, message.target) for message in timeline.messages})
    for thread, (source, target) in enumerate(pairs):
        named = {"name": f"{source} to {target}"}
        events.append({"ph": "M", "name": "thread_name", "pid": n, "tid": thread, "args": named})
    events += _computed(timeline)
    for message in timeline.messages:
        events.append(
            {
                "ph": "X",
                "name": label(message.op),
                "cat": "message",
                "pid": n,
                "tid": pairs.index((message.source, message.target)),
                "ts": message.start_ns / 1e3,
                "dur": (message.freed_ns - message.start_ns) / 1e3,
                "args": {
                    "waited_us": (message.start_ns - message.ready_ns) / 1e3,
                    "arrives_us": message.arrives_ns / 1e3,
                },
            }
        )
    events += _exchanged(timeline, n, len(pairs))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _exchanged(timeline: Timeline, process: int, thread: int) -> Iterator[dict[str, Any]]:
    """The exchanges between replicas: a thread for each network, after those of the links."""
    exchanges = timeline.all_exchanges
    networks = sorted({one.resource for one in exchanges})
    for number, _ in enumerate(networks):
        named = {"name": f"between replicas {number}"}
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread + number, "args": named}
    thread_of = {network: thread + number for number, network in enumerate(networks)}
    for one in exchanges:
        yield {
            "ph": "X",
            "name": f"{'weights' if one.before else 'gradients'} s{one.stage}",
            "cat": "exchange",
            "pid": process,
            "tid": thread_of[one.resource],
            "ts": one.start_ns / 1e3,
            "dur": (one.freed_ns - one.start_ns) / 1e3,
            "args": {"arrives_us": one.ends_ns / 1e3},
        }


def _computed(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for device, order in enumerate(timeline.schedule.orders):
        for op, start, end in zip(order, timeline.starts[device], timeline.ends[device], strict=True):
            yield {
                "ph": "X",
                "name": label(op),
                "cat": op.kind.name,
                "pid": device,
                "tid": 0,
                "ts": start / 1e3,
                "dur": (end - start) / 1e3,
                "args": {"stage": op.stage, "microbatch": op.microbatch},
            }


def label(op: Op) -> str:
    return f"{op.kind.name}{op.microbatch} s{op.stage}" + (f".{op.part}" if op.part else "")


def draw(timeline: Timeline, files: Sequence[Path], title: str, names: Sequence[str] = ()) -> None:
    """Write a Gantt chart in the form of each file's suffix (.svg, .png). Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    n = timeline.schedule.n_devices
    pairs = sorted({(message.source, message.target) for message in timeline.messages})
    exchanges = timeline.all_exchanges
    networks = sorted({one.resource for one in exchanges})
    rows = n + len(pairs) + len(networks)
    figure = Figure(figsize=(_INCHES_WIDE, 1.4 + 0.34 * rows), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    _draw_operations(axes, timeline)
    shortest_ns = timeline.makespan_ns // 2000  # so that a message is seen
    for row, pair in enumerate(pairs, n):
        sent = [
            (m.start_ns / 1e9, max(m.freed_ns - m.start_ns, shortest_ns) / 1e9)
            for m in timeline.messages
            if (m.source, m.target) == pair
        ]
        axes.broken_barh(sent, (row - 0.3, 0.6), facecolors=LINK_COLOUR, edgecolor="white", linewidth=0.3)
    for row, network in enumerate(networks, n + len(pairs)):
        exchanged = [
            (one.start_ns / 1e9, (one.freed_ns - one.start_ns) / 1e9) for one in exchanges if one.resource == network
        ]
        axes.broken_barh(exchanged, (row - 0.3, 0.6), facecolors=EXCHANGE_COLOUR, edgecolor="white", linewidth=0.3)
    axes.set_yticks(
        range(rows),
        [
            *(names or [f"device {d}" for d in range(n)]),
            *(f"link {a} to {b}" for a, b in pairs),
            *["replicas"] * len(networks),
        ],
        parse_math=False,
    )
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_xlim(0, timeline.makespan_ns / 1e9)
    axes.set_xlabel("seconds")
    axes.set_title(title, parse_math=False)
    shown = {op.kind for order in timeline.schedule.orders for op in order}
    words = {Kind.F: "forward", Kind.D: "gradient of the input", Kind.W: "of the weights", Kind.B: "backward"}
    handles = [Patch(color=COLOURS[kind], label=words[kind]) for kind in Kind if kind in shown]
    if pairs:
        handles.append(Patch(color=LINK_COLOUR, label="message on its link"))
    if networks:
        handles.append(Patch(color=EXCHANGE_COLOUR, label="weights and gradients of replicas"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    save(figure, files)


def save(figure: Figure, files: Sequence[Path]) -> None:
    """Write a drawing in the form of each file's suffix; the same drawing gives the same file. Raises OSError."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "dips"}):
        for file in files:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else {})


def _draw_operations(axes: Axes, timeline: Timeline) -> None:
    labelled = timeline.schedule.n_ops <= _MOST_LABELS and timeline.schedule.parts == 1
    for device, order in enumerate(timeline.schedule.orders):
        for kind in Kind:
            bars = [
                (start / 1e9, (end - start) / 1e9)
                for op, start, end in zip(order, timeline.starts[device], timeline.ends[device], strict=True)
                if op.kind is kind
            ]
            if bars:
                axes.broken_barh(bars, (device - 0.4, 0.8), facecolors=COLOURS[kind], edgecolor="white", linewidth=0.4)
        if labelled:
            for op, start, end in zip(order, timeline.starts[device], timeline.ends[device], strict=True):
                axes.text((start + end) / 2e9, device, str(op.microbatch), ha="center", va="center", fontsize=5.5)
