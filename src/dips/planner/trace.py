"""Writes a timeline in Chrome's trace format, which Perfetto (ui.perfetto.dev) opens, and as a drawing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dips.planner.ir import Kind, Op
from dips.planner.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {Kind.F: "#56B4E9", Kind.D: "#E69F00", Kind.W: "#009E73", Kind.B: "#D55E00"}
"""The colours of Okabe and Ito, which colour-blind people can distinguish."""

LINK_COLOUR, OTHER_LINK_COLOUR, EXCHANGE_COLOUR = "#555555", "#AAAAAA", "#CC79A7"

MOST_LANES = 8
"""Replicas that have a lane in the row of each device."""

_WORDS = {
    Kind.F: "forward", Kind.D: "gradient of the input", Kind.W: "gradient of the weights", Kind.B: "backward",
}  # fmt: skip
_ROW_WORDS = {
    LINK_COLOUR: "message on its link",
    OTHER_LINK_COLOUR: "message of another replica",
    EXCHANGE_COLOUR: "weights and gradients between replicas",
}
_INCHES_WIDE, _INCHES_A_ROW, _INCHES_A_DIGIT = 12.0, 0.34, 0.06
_LANE_ROWS = 0.35
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


def draw(
    timelines: Sequence[Timeline],
    files: Sequence[Path],
    title: str,
    names: Sequence[str] = (),
    links: Mapping[tuple[int, int], str] | None = None,
    note: str = "",
) -> None:
    """Write drawing() in the form of each file's suffix (.svg, .png)."""
    save(drawing(timelines, title, names, links or {}, note), files)


def drawing(
    timelines: Sequence[Timeline], title: str, names: Sequence[str], links: Mapping[tuple[int, int], str], note: str
) -> Figure:
    """A Gantt chart: a row for each device, with a lane for each replica, then rows for links and for what replicas
    exchange. Needs matplotlib.

    timelines: of each replica; they share links, and the axis ends with the last of them. names[d]: of device d. links:
    by sender and receiver the name of the link; messages with the same name share a row. note: what a row of a device
    has."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begin_ns = min(one.begin_ns for one in timelines)
    end_ns = max(one.end_ns for one in timelines)
    lanes, n = lanes_of(timelines), timelines[0].schedule.n_devices
    high = max(1.0, _LANE_ROWS * len(lanes))  # a row of a device, in rows of a link
    middles = [high * (device + 0.5) for device in range(n)]
    below = _message_rows(timelines, links) + _exchange_rows(timelines[0], names)
    middles += [high * n + 0.5 + row for row in range(len(below))]
    figure = Figure(
        figsize=(_INCHES_WIDE, 1.4 + _INCHES_A_ROW * (high * n + len(below))), dpi=110, layout="constrained"
    )
    axes = figure.add_subplot()
    lane_rows = 0.84 * high / len(lanes)
    for device, middle in enumerate(middles[:n]):
        for number, lane in enumerate(lanes):
            at = middle + (number + 0.5 - len(lanes) / 2) * lane_rows
            _draw_operations(axes, timelines[lane], device, (at, lane_rows, begin_ns, end_ns))
    for (_, bars), middle in zip(below, middles[n:], strict=True):
        for colour in dict.fromkeys(bar.colour for bar in bars):
            spans = [((bar.start_ns - begin_ns) / 1e9, bar.lasts_ns / 1e9) for bar in bars if bar.colour == colour]
            axes.broken_barh(spans, (middle - 0.3, 0.6), facecolors=colour, **_edge(spans, end_ns - begin_ns))
    labels = [*(names or [f"device {d}" for d in range(n)]), *(label for label, _ in below)]
    axes.set_yticks(middles, labels, parse_math=False)
    axes.set_ylim(high * n + len(below) + 0.1, -0.1)
    axes.set_xlim(0, (end_ns - begin_ns) / 1e9)
    axes.set_xlabel("time, seconds")
    if note:
        axes.set_ylabel(note, parse_math=False, y=1 - high * n / 2 / (high * n + len(below)))
    axes.set_title(title, parse_math=False)
    shown = {op.kind for order in timelines[0].schedule.orders for op in order}
    handles = [Patch(color=COLOURS[kind], label=_WORDS[kind]) for kind in Kind if kind in shown]
    drawn = {bar.colour for _, bars in below for bar in bars}
    words = _ROW_WORDS | ({LINK_COLOUR: "message of the first replica"} if OTHER_LINK_COLOUR in drawn else {})
    handles += [Patch(color=colour, label=text) for colour, text in words.items() if colour in drawn]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles) if len(handles) <= 5 else 3, frameon=False
    )
    return figure


def _edge(spans: Sequence[tuple[float, float]], whole_ns: int) -> dict[str, Any]:
    """A white line around bars; none where they are so short that it would hide them."""
    wide = sum(lasts for _, lasts in spans) / len(spans) * 1e9 / whole_ns * _INCHES_WIDE > _INCHES_A_DIGIT / 2
    return {"edgecolor": "white", "linewidth": 0.4} if wide else {"linewidth": 0}


def lanes_of(timelines: Sequence[Timeline]) -> list[int]:
    """The replicas that are drawn: all, or of many the first ones and the one that ends last."""
    if len(timelines) <= MOST_LANES:
        return list(range(len(timelines)))
    first = list(range(MOST_LANES - 1))
    rest = range(MOST_LANES - 1, len(timelines))
    return [*first, max(rest, key=lambda replica: max(ends[-1] for ends in timelines[replica].ends if ends))]


class _Bar(NamedTuple):
    start_ns: int
    lasts_ns: int
    colour: str


def _message_rows(timelines: Sequence[Timeline], links: Mapping[tuple[int, int], str]) -> list[tuple[str, list[_Bar]]]:
    """A row for each link: its name, and the messages of all replicas on it."""
    shortest_ns = max(one.makespan_ns for one in timelines) // 2000  # so that a message is seen
    pairs = {(message.source, message.target) for one in timelines for message in one.messages}
    named = {pair: name for pair, name in links.items() if pair in pairs}
    named |= {pair: f"link {pair[0]} to {pair[1]}" for pair in sorted(pairs - set(links))}
    rows: dict[str, list[_Bar]] = {name: [] for name in named.values()}
    for replica, one in enumerate(timelines):
        colour = OTHER_LINK_COLOUR if replica else LINK_COLOUR
        for m in one.messages:
            lasts_ns = max(m.freed_ns - m.start_ns, shortest_ns)
            rows[named[m.source, m.target]].append(_Bar(m.start_ns, lasts_ns, colour))
    return list(rows.items())


def _exchange_rows(timeline: Timeline, names: Sequence[str]) -> list[tuple[str, list[_Bar]]]:
    """A row for each network on which replicas exchange: the devices whose stages do, and the exchanges."""
    rows: dict[int, list[_Bar]] = {}
    devices: dict[int, set[int]] = {}
    for one in sorted(timeline.all_exchanges, key=lambda one: one.resource):
        rows.setdefault(one.resource, []).append(_Bar(one.start_ns, one.freed_ns - one.start_ns, EXCHANGE_COLOUR))
        devices.setdefault(one.resource, set()).add(timeline.schedule.device_of_stage[one.stage])

    def label(resource: int) -> str:
        first, *others = devices[resource]
        if others:
            return f"replicas of {len(others) + 1} devices"
        return f"replicas of {names[first] if names else f'device {first}'}"

    return [(label(resource), bars) for resource, bars in rows.items()]


def save(figure: Figure, files: Sequence[Path]) -> None:
    """Write a drawing in the form of each file's suffix; the same drawing gives the same file. Raises OSError."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "dips"}):
        for file in files:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else {})


def _draw_operations(axes: Axes, timeline: Timeline, device: int, lane: tuple[float, float, int, int]) -> None:
    """The operations of one device. lane: its middle and height in rows, and the begin and end of the axis."""
    at, height, begin_ns, end_ns = lane
    order, starts, ends = timeline.schedule.orders[device], timeline.starts[device], timeline.ends[device]
    for kind in Kind:
        bars = [
            ((start - begin_ns) / 1e9, (end - start) / 1e9)
            for op, start, end in zip(order, starts, ends, strict=True)
            if op.kind is kind
        ]
        if bars:
            edge = _edge(bars, end_ns - begin_ns)
            axes.broken_barh(bars, (at - 0.46 * height, 0.92 * height), facecolors=COLOURS[kind], **edge)
    if timeline.schedule.parts > 1 or timeline.schedule.n_ops > _MOST_LABELS:
        return
    for op, start, end in zip(order, starts, ends, strict=True):
        text = str(op.microbatch)
        if (end - start) / (end_ns - begin_ns) * _INCHES_WIDE > _INCHES_A_DIGIT * (len(text) + 0.5):
            axes.text(((start + end) / 2 - begin_ns) / 1e9, at, text, ha="center", va="center_baseline", fontsize=5.5)
