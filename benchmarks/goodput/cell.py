"""Measures one system under one condition."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from peers.party import Failed, tree
from quiet import Foreign, processor_s
from shaped import ShapedNet

from goodput.conditions import Condition, Setting
from goodput.score import Counted, exchanges, lost_s, share, spans
from goodput.systems import System

LEAD_S = 1.0
WARM_UP = 2
"""Exchanges of each cluster that are not counted: joins, first allocations, a speed that is learnt."""

LOOK_S = 0.2
AFTER_ROUNDS, AFTER_S = 2.0, 15.0
"""How long the last exchange is waited for beyond the measurement's end."""

START_ROUNDS, START_S = 6.0, 240.0
"""How long the warm-up may take."""

VICTIM = 1
"""Which cluster is killed; the first is where others find the run of a system without servers."""

KILL_AT = 0.5
"""Rounds into the measurement: in the middle of an inner loop."""


@dataclass(frozen=True)
class Score:
    """What a cell says. share: of ideal; share_after_kill: from each cluster's last exchange before the kill on.
    lost_s: seconds of training that an exchange costs a cluster. longest_pause_s: of a cluster that was not killed.
    link_bytes: up and down of each cluster's link, for an exchange. cpu_s: for an exchange of a cluster, the servers'
    included. own_count: steps in the model as the system itself counts them, beside what was counted here. foreign:
    processors that other work kept busy; niced: what work of low priority took besides.
    """

    share: float
    share_after_kill: float | None
    lost_s: float
    longest_pause_s: float
    exchanges: int
    link_bytes: dict[str, tuple[float, float]]
    cpu_s: float
    counted_twice: float
    counted: float
    own_count: float | None
    foreign: float
    niced: float
    notes: list[str]


class Usage:
    """Processor seconds of processes that come and go, and the bytes on each link, since the last begin().

    Other work on the machine is what is used by no descendant of this program: the net's relay is one.
    """

    def __init__(self, party: System) -> None:
        self._party = party
        self._seen: dict[int, float] = {}
        self._of_all: dict[int, float] = {}

    def begin(self) -> None:
        self.look()
        self._from_s, self._links = sum(self._seen.values()), self._party.net.carried()
        self._foreign = Foreign(lambda: sum(self._of_all.values()))

    def look(self) -> None:
        """Often enough that little is missed of a process that ends."""
        own = [pid for pids in self._party.pids().values() for pid in pids]
        for pids, seen in ((own, self._seen), (tree(os.getpid()), self._of_all)):
            for pid in pids:
                seen[pid] = max(seen.get(pid, 0.0), processor_s(pid))

    def end(self) -> tuple[float, dict[str, tuple[int, int]], tuple[float, float]]:
        """Processor seconds, bytes up and down by cluster, and processors of other work, of usual and low priority."""
        self.look()
        links = {}
        for site, (up, down) in self._party.net.carried().items():
            if site not in self._party.servers:
                links[site] = up - self._links[site][0], down - self._links[site][1]
        niced = self._foreign.niced()
        return sum(self._seen.values()) - self._from_s, links, (self._foreign.cores() - niced, niced)


def measure(make: Callable[[ShapedNet], System], kind: type[System], setting: Setting, condition: Condition) -> Score:
    """Raises shaped.NotPossible, peers.party.Failed or peers.environments.NotInstallable."""
    with ShapedNet(kind.sites(setting, condition), f"dips{os.getpid()}") as net, make(net) as party:
        return Measurement(party, setting, condition).run()


class Measurement:
    def __init__(self, party: System, setting: Setting, condition: Condition) -> None:
        self._party = party
        self._setting = setting
        self._condition = condition
        self._round_s = setting.round_s(condition)
        self._steps_s = {f"c{number}": step_s for number, step_s in enumerate(setting.steps_s(condition))}
        self._usage = Usage(party)
        self._killed = ""

    def run(self) -> Score:
        party, setting = self._party, self._setting
        party.tell(at_s=time.monotonic() + LEAD_S)
        self._wait(lambda: self._have(WARM_UP, 0.0), START_ROUNDS * self._round_s + START_S, "the warm-up")
        self._usage.begin()
        begin_s, kill_s = time.monotonic(), None
        if self._condition.kills:
            self._wait(lambda: time.monotonic() > begin_s + KILL_AT * self._round_s)
            self._killed = f"c{VICTIM}" if self._condition.kills_cluster else party.kills
            kill_s = time.monotonic()
            party.kill(self._killed)
            party.start_again(self._killed)
        end_s = (kill_s or begin_s) + setting.rounds * self._round_s
        self._wait(lambda: time.monotonic() > end_s)
        self._wait(lambda: self._have(1, end_s), AFTER_ROUNDS * self._round_s + AFTER_S)
        return self._score(begin_s, kill_s, end_s)

    def _score(self, begin_s: float, kill_s: float | None, end_s: float) -> Score:
        party = self._party
        cpu_s, links, foreign = self._usage.end()
        now_s = time.monotonic()
        steps, counted = party.steps(), party.counted()
        whole = spans(steps, counted, self._steps_s, (begin_s, end_s))
        after = None
        if kill_s is not None:
            found = spans(steps, counted, self._steps_s, (kill_s, end_s), whole_before=True)
            after = share(found, self._steps_s)
        times = exchanges(counted)
        ended = {cluster: sum(begin_s < at <= now_s for at in times.get(cluster, [])) for cluster in self._steps_s}
        by_exchange = {
            cluster: (up / max(1, ended[cluster]), down / max(1, ended[cluster]))
            for cluster, (up, down) in links.items()
        }
        arithmetic_s = sum(step.cpu_s for step in steps if begin_s < step.ended_s <= now_s)
        return Score(
            share(whole, self._steps_s), after, lost_s(whole, self._steps_s),
            max(span.longest_pause_s for cluster, span in whole.items() if cluster != self._killed),
            sum(span.exchanges for span in whole.values()),
            by_exchange, (cpu_s - arithmetic_s) / max(1, sum(ended.values())), party.twice(), _total(counted),
            party.own_count(), *foreign, party.notes(),
        )  # fmt: skip

    def _have(self, n: int, since_s: float) -> bool:
        """Whether every cluster has ended so many exchanges since."""
        found = exchanges(self._party.counted())
        return all(sum(at >= since_s for at in found.get(cluster, [])) >= n for cluster in self._steps_s)

    def _wait(self, until: Callable[[], bool], at_most_s: float = float("inf"), what: str = "") -> None:
        """what: is given up with Failed when it takes longer; nothing: it is no matter."""
        end_s = time.monotonic() + at_most_s
        while not until():
            if time.monotonic() > end_s:
                if what:
                    raise Failed(f"{self._party.name}: {what} took more than {at_most_s:.0f} s")
                return
            for name, process in self._party.processes.items():
                if process.poll() is not None:
                    raise Failed(f"{self._party.name}: {name} has ended; its log ends:\n{self._party.log(name)}")
            self._usage.look()
            time.sleep(LOOK_S)


def _total(counted: list[Counted]) -> float:
    return sum((each.last - each.first + 1) / each.parts for each in counted)
