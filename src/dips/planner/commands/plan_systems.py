"""Asks every system how to train a problem, compares their answers for the same batch, and says which to use and why;
and before that which way to use the sites (dips.planner.commands.plan_ways).

JEEVES and CrossPipe order the operations of the pipelines that the file describes; SpanTrain groups the devices and
chooses layers and microbatches too; ScaleAcross Explorer chooses all degrees of parallelism. These train synchronously.
Asynchronous clusters under Di-PS do not: they train more tokens in the same time, and need more of them for the same
loss (more_tokens() of dips.planner.commands.plan_clusters).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dips.core.errors import ConfigError
from dips.planner.calibration import interval_json
from dips.planner.candidates import RefusedCandidate
from dips.planner.commands.plan_best import (
    DECIDE_INSIDE,
    SCHEDULES_OF,
    System,
    SystemAnswer,
    asked_scaleacross,
    asked_spantrain,
    count,
)
from dips.planner.commands.plan_clusters import asynchronous_clusters, inner_steps
from dips.planner.commands.plan_ways import CLUSTERS, PIPELINE, SiteWays, compare_ways
from dips.planner.plan import Plan, make_plan, schedules_of
from dips.planner.problem import Problem

CANNOT_SEE = {
    System.JEEVES: "gradients of weights as operations of their own; stages and replicas other than the file's",
    System.CROSSPIPE: "stages and replicas other than the file's (dips plan tradeoff compares them)",
    System.SPANTRAIN: "expert and context parallelism, zero_stage, blocks in parts; other orders than compact_zb",
    System.SCALEACROSS: "measured times of a [profile]; schedules other than DoraPP and interleaved ZBV; as printed, "
    "its Algorithm 1 knows no contention for links (here one message at a time goes over each)",
    System.DIPS: "how many more tokens it needs for the same loss; the wait for the grace window of a round",
}
"""What a system leaves out: where it matters, its answer is further off than the others'."""

COUNT_OVERHEADS = (*SCHEDULES_OF, System.SPANTRAIN)
"""Systems whose times count the overheads of a calibration, so that its error is theirs."""


@dataclass(frozen=True)
class SystemChoice:
    """All answers, and which to use."""

    problem: Problem
    answers: tuple[SystemAnswer, ...]  # most tokens a second first
    refused: tuple[RefusedCandidate, ...]  # systems that cannot train this problem
    plan: Plan | None  # of the pipelines that the file describes, with the schedules of all systems that were asked
    use: SystemAnswer  # where all sites train
    why: tuple[str, ...]  # sentences without a full stop
    ways: SiteWays | None  # to use several sites, where dips and a system that trains synchronously were asked


def decide(
    problem: Problem,
    systems: Sequence[System] = tuple(System),
    sensitivity: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> SystemChoice:
    """Ask the systems. sensitivity: also which change of a setting would help the pipelines most; say: is told what is
    being done.

    Raises ConfigError where none of them can train the problem, with the reason of the first.
    """
    schedules_of(problem)  # a mistake in the file is one of the user, not a system's refusal
    answers: list[SystemAnswer] = []
    refused: list[RefusedCandidate] = []
    say("planning the file's pipelines")
    plan = _pipelines(problem, systems, sensitivity)
    steps = inner_steps(problem, systems) if System.DIPS in systems and len(problem.setup.sites) > 1 else {}
    for system in systems:
        say(f"asking {system.value}")
        try:
            answers.append(_ask(system, problem, plan, steps))
        except ConfigError as error:
            refused.append(RefusedCandidate(system.value, str(error)))
    if not answers:
        others = ", ".join(no.name for no in refused if no.why != refused[0].why)
        more = f"; no answer either from {others} (--system NAME says why)" if others else ""
        raise ConfigError(refused[0].why + more)
    answers.sort(key=lambda answer: -answer.tokens_per_s)
    best, reasons = _best_together(problem, answers)
    apart = next((answer for answer in answers if not answer.synchronous), None)
    both = System.DIPS in systems and len(systems) > 1
    ways = None
    if both and len(problem.setup.sites) > 1:
        # Those of all sites are from the answers of the systems.
        no_ways = list[RefusedCandidate]()
        if best is None and (why := next((no.why for no in refused if no.name != System.DIPS), "")):
            no_ways.append(RefusedCandidate(PIPELINE, why))
        if why := next((no.why for no in refused if no.name == System.DIPS), ""):
            no_ways.append(RefusedCandidate(CLUSTERS, why))
        ways = compare_ways(problem, best, steps, no_ways, systems, say)
    of_all = [way for way in ways.found if ways.of_all(way)] if ways else []
    # The fastest synchronous answer, unless asynchronous clusters make up for their tokens.
    use = apart if best is None or (apart is not None and of_all and not of_all[0].synchronous) else best
    assert use is not None
    whole = plan if isinstance(plan, Plan) else None
    return SystemChoice(problem, tuple(answers), tuple(refused), whole, use, tuple(reasons), ways)


def _pipelines(problem: Problem, systems: Sequence[System], sensitivity: bool) -> Plan | ConfigError:
    """The plan of the file's pipelines, with the schedules of the systems, or why there is none."""
    asked = [system for system in systems if system in SCHEDULES_OF]
    names = schedules_of(problem)
    if len(asked) < len(SCHEDULES_OF):
        names = [name for name in names if any(name in SCHEDULES_OF[system] for system in asked)]
        problem = problem.with_options(schedules=names)
    if not names:
        return _left_out(problem)
    try:
        return make_plan(problem, sensitivity)
    except ConfigError as error:
        return error


def _left_out(problem: Problem) -> ConfigError:
    return ConfigError(
        f"{problem.setup.file} [options]: schedules has none of its schedules: add one, or remove the key"
    )


def _ask(system: System, problem: Problem, plan: Plan | ConfigError, steps: Mapping[int, SystemAnswer]) -> SystemAnswer:
    """One system's answer. steps: of clusters. Raises ConfigError where it has none."""
    training = problem.setup.training
    if system in SCHEDULES_OF:
        if isinstance(plan, ConfigError):
            raise plan
        own = tuple(one for one in plan.candidates if one.name.removeprefix("dp/") in SCHEDULES_OF[system])
        if not own:
            reasons = [no.why for no in plan.refused if no.name in SCHEDULES_OF[system]]
            raise ConfigError(reasons[0]) if reasons else _left_out(problem)
        best = own[0]
        what = f"{best.name}, {count(training.pipeline, 'stage')} x {count(training.data, 'replica')}"
        return SystemAnswer.of_batch(system, what, problem.setup, best.iteration_s, replace(plan, candidates=own))
    if system in DECIDE_INSIDE:
        return (asked_spantrain if system is System.SPANTRAIN else asked_scaleacross)(problem.setup)
    clusters = asynchronous_clusters(problem, steps=steps)
    every = problem.setup.asynchronous.sync_every
    what = f"{len(clusters.clusters)} clusters, H {every}, servers at {clusters.servers_at}"
    return SystemAnswer(system, what, clusters.tokens_per_s, None, clusters)


def _best_together(problem: Problem, answers: Sequence[SystemAnswer]) -> tuple[SystemAnswer | None, list[str]]:
    """The fastest of the synchronous answers that can be advised, if there are any, and why."""
    free = [site.name for site in problem.setup.sites if site.network_gbps is None]
    advised = [one for one in answers if one.synchronous and not (free and one.system in DECIDE_INSIDE)]
    together = advised or [one for one in answers if one.synchronous]
    if not together:
        return None, ["no system that trains synchronously was asked and can train this problem"]
    best, *others = together
    reasons = [
        f"{best.system.value} has the shortest iteration of those that train synchronously"
        + "".join(f"; {one.system.value} takes {best.tokens_per_s / one.tokens_per_s - 1:.1%} longer" for one in others)
    ]
    guessed = [one.system.value for one in answers if free and one.system in DECIDE_INSIDE]
    if guessed:
        reasons.append(
            f"{' and '.join(guessed)} chose tensor, context and data parallelism as if the network inside of "
            f"{', '.join(free)} cost nothing{', and are not advised' if advised else ''}: give network_gbps there"
        )
    return best, reasons


# ---- JSON ------------------------------------------------------------------------------------------------------------


def decision_json(found: SystemChoice) -> dict[str, Any]:
    """The systems' answers as JSON; times in seconds."""
    return {
        "ways": None if found.ways is None else found.ways.to_json(),
        "use": found.use.system.value,
        "why": list(found.why),
        "systems": [_answer_json(found, answer) for answer in found.answers],
        "no_answer": [{"system": no.name, "why": no.why} for no in found.refused],
    }


def _answer_json(found: SystemChoice, answer: SystemAnswer) -> dict[str, Any]:
    calibrated = answer.iteration_s if answer.system in COUNT_OVERHEADS else None
    error = found.problem.calibration_error
    return {
        "system": answer.system.value,
        "what": answer.what,
        "tokens_per_s": answer.tokens_per_s,
        "iteration_s": answer.iteration_s,
        **(interval_json("iteration", calibrated, error) if calibrated is not None else {}),
        "synchronous": answer.synchronous,
        "cannot_see": CANNOT_SEE[answer.system],
        **({} if isinstance(answer.found, Plan) else {"found": answer.found.to_json()}),
    }
