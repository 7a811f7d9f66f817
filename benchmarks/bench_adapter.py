"""What SpanTrain's adapter gains and costs: under the shipped traces, and for random pipelines and bandwidths.

Prints the time that the state machine takes to observe one message (adapter/decide.py counts MONITOR_NS for it);
for each shipped trace how many times faster iterations are with the adapter, in the settings of `dips plan validate
--paper spantrain`; and for random pipelines (2 to 6 uneven stages, links and overheads, 4 to 16 microbatches) under
random bandwidths how often it is faster, and by how much slower at worst.

    python benchmarks/bench_adapter.py [--pipelines N] [--seed S] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from dips.planner.adapter.decide import AdapterComparison, compare
from dips.planner.adapter.pieces import LinkMessage
from dips.planner.adapter.traces import WHOLE, Channel
from dips.planner.costs import NS
from dips.planner.model import shipped
from dips.planner.validation.spantrain import NOMINAL, ORDERS, OVERHEADS_MS, Setting, setting


def observation_us(messages: int = 20_000) -> float:
    """The mean time to observe one message while nothing changes."""
    rules = setting("1f1b", 0.7).rules()
    border = rules.borders[0]
    state, transfer = rules.start, LinkMessage(border.sender, border.receiver, 32, 0, border.busy_ns, border.busy_ns)
    begin = time.perf_counter()
    for _ in range(messages):
        state = rules.observe(state, transfer)
    return (time.perf_counter() - begin) / messages * 1e6


def random_case(drawn: random.Random, overheads_ms: tuple[float, ...]) -> AdapterComparison:
    """A random pipeline, a minute under random bandwidths of 20 to 100 % of its links'."""
    stages = drawn.randint(2, 6)
    one = Setting(
        drawn.choice(("compact_zb", "1f1b", "zb_h1", "gpipe")),
        tuple((drawn.uniform(50, 150), drawn.uniform(50, 150), drawn.uniform(50, 150)) for _ in range(stages)),
        tuple(drawn.uniform(5, 250) for _ in range(stages - 1)),
        drawn.choice(overheads_ms),
        drawn.choice((0.0, 5.0, 50.0)),
        drawn.randint(4, 16),
        drawn.choice((4, 6, 8, 32)),
    )
    rules, channels = one.rules(), {}
    for border in rules.borders:
        steps = sorted(drawn.sample(range(1, 60), drawn.randint(1, 12)))
        rates = tuple(round(drawn.uniform(0.2, 1) * WHOLE) for _ in range(len(steps) + 1))
        channels[border.resource] = Channel((0, *(at * NS for at in steps)), rates)
    return compare(rules, channels, 60 * NS)


def random_rows(pipelines: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    for name, overheads_ms in (("0 to 20 ms", (0.0, 1.0, 5.0, 20.0)), ("10 to 50 ms", (10.0, 25.0, 50.0))):
        drawn = random.Random(seed)
        cases = [random_case(drawn, overheads_ms) for _ in range(pipelines)]
        late = [one for one in cases if one.late]
        faster = [one.speedup for one in late]
        rows.append(
            {
                "overhead": name,
                "late": len(late),
                "faster": sum(one.slower_ns < 0 for one in late),
                "geometric_mean": statistics.geometric_mean(faster),
                "least": min(faster),
                "greatest": max(faster),
                "beyond_stated_cost": sum(one.slower_ns > one.cost_ns for one in cases),
            }
        )
    return rows


def traced_rows() -> list[dict[str, Any]]:
    return [
        {"overhead_ms": operation_ms, "order": order, "message": nominal}
        | {trace: setting(order, nominal, operation_ms).compared(trace).speedup for trace in shipped("traces")}
        for operation_ms in OVERHEADS_MS
        for order in ORDERS
        for nominal in NOMINAL
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=200, help="random pipelines for each range of overheads")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.pipelines = 10
    observed_us, traced, drawn = observation_us(), traced_rows(), random_rows(options.pipelines, options.seed)
    if options.json:
        print(json.dumps({"observation_us": observed_us, "traces": traced, "random": drawn}))
        return
    print(f"one message is observed in {observed_us:.1f} us")
    for rows in (traced, drawn):
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        for row in rows:
            cells = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
