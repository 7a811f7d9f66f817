"""Computes the judgement of a record (JUDGE) a second time, from the inputs that the record names.

Written from docs/algorithm.md, in plain arithmetic on dictionaries, and by no code that the master judges with
(master/state/penalty*.py): a mistake there must not be repeated here. The master's record carries all that a judgement
follows from, except what the detector remembered, which follows from the records before. The simulator, the search and
`dips verify` ask the same Judging. Pure: no files, no clock.

Legend: as docs/algorithm.md. G: norm of a push's pseudo-gradient; Gn: the same for the usual number of tokens; T tokens
and H local steps of a push; per cluster n accepted pushes, mu and V mean and variance of Gn, T and H the usual ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any

Fields = Mapping[str, Any]
Pair = tuple[int, int]
PushState = tuple[Pair, Pair]
"""A version and its round: after the loss of a journal, two rounds may make the same version."""

FORMAT = 1
"""The format of the inputs in a record that this release understands; records of older releases have none."""

RELATIVE = 1e-9
"""Relative tolerance against the float computed here: sums are not added in the same order everywhere."""

MAX_TOKENS = 2.0**63

KEPT = 256
"""How many states of the detector are kept, of the newest versions: a ROLLBACK goes back to a version that slaves keep
on disk, and these are few."""

MAX_SENTENCES = 4
"""How many sentences are kept of one record: the first wrong number explains the others."""


def near(a: float, b: float, slack: float = 0.0) -> bool:
    """Whether two numbers are equal except for rounding; NaN is near NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    return abs(a - b) <= RELATIVE * max(abs(a), abs(b)) + slack < math.inf


# ---- what the detector remembers ----


@dataclass(frozen=True)
class ClusterMemory:
    """The detector's state of one cluster."""

    n: int = 0
    mu: float = 0.0
    V: float = 0.0
    T: float | None = None
    H: int = 0
    flags: int = 0
    score_flags: int = 0
    quarantined: bool = False


@dataclass(frozen=True)
class PenaltyMemory:
    """The detector's state of all clusters; the lists that they share are oldest first."""

    of: Mapping[str, ClusterMemory]
    norms: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    merged: tuple[float, ...] = ()
    voids: int = 0

    @property
    def quarantined(self) -> frozenset[str]:
        return frozenset(name for name, known in self.of.items() if known.quarantined)


def memory_of(detector: Fields) -> PenaltyMemory:
    """Parse the detector's state as a ledger holds it. Raises KeyError, TypeError or ValueError when it is none."""
    of = {
        str(name): ClusterMemory(
            int(raw["accepted"]), float(raw["mean"]), float(raw["variance"]),
            None if raw["mean_tokens"] is None else float(raw["mean_tokens"]), int(raw["steps"]),
            int(raw["flags_in_a_row"]), int(raw["score_rejections_in_a_row"]), bool(raw["quarantined"]),
        )
        for name, raw in detector["clusters"].items()
    }  # fmt: skip
    norms, scores, merged = (tuple(map(float, detector[name])) for name in ("norms", "scores", "merged_norms"))
    return PenaltyMemory(of, norms, scores, merged, int(detector["voids_in_a_row"]))


def difference(ours: PenaltyMemory, theirs: PenaltyMemory) -> str:
    """A sentence about the first difference of `theirs` from what was computed here; empty when there is none."""
    if ours.of.keys() != theirs.of.keys():
        return f"it has clusters {', '.join(theirs.of) or 'none'}, not {', '.join(ours.of) or 'none'}"
    if ours.voids != theirs.voids:
        return f"it counts {theirs.voids} void rounds in a row, not {ours.voids}"
    for name, a in ours.of.items():
        b = theirs.of[name]
        if (a.n, a.H, a.flags, a.score_flags, a.quarantined) != (b.n, b.H, b.flags, b.score_flags, b.quarantined):
            return f"for cluster {name} it has {b}, not {a}"
        slack = RELATIVE * a.mu * a.mu
        same_T = (a.T is None and b.T is None) or (a.T is not None and b.T is not None and near(a.T, b.T))
        if not (near(a.mu, b.mu) and near(a.V, b.V, slack) and same_T):
            return f"for cluster {name} it has {b}, not {a}"
    for what, mine, other, slack in (
        ("norms", ours.norms, theirs.norms, 0.0),
        ("scores", ours.scores, theirs.scores, 1e-6),
        ("merged norms", ours.merged, theirs.merged, 1e-9),
    ):
        if len(mine) != len(other) or not all(near(a, b, slack) for a, b in zip(mine, other, strict=True)):
            return f"the last {what} are {_short(other)}, not {_short(mine)}"
    return ""


def _short(values: Sequence[float]) -> str:
    return f"[..., {', '.join(f'{value:.6g}' for value in values[-3:])}] ({len(values)} of them)"


# ---- one round, computed again ----


@dataclass(frozen=True)
class Round:
    """The inputs of one judgement, parsed from its record. Lists are in the order of `names`."""

    names: tuple[str, ...]
    T: tuple[float, ...]
    H: tuple[int, ...]
    made: tuple[int, ...]
    nonfinite: tuple[int, ...]
    zero: tuple[bool, ...]
    gram: tuple[tuple[float, ...], ...]
    live: frozenset[str]
    rates: Mapping[str, float]
    intervals_s: Mapping[str, float]
    round_tokens: float
    settings: Fields
    detector: Fields | None

    def number(self, name: str) -> float:
        return float(self.settings[name])


def round_of(participants: Sequence[Fields], inputs: Fields) -> Round:
    """Parse a judgement's inputs. Raises KeyError, TypeError or ValueError for a missing or wrong field."""
    names = tuple(str(item["push"][0]) for item in participants)
    k = len(names)
    gram = [[0.0] * k for _ in range(k)]
    for (row, column), text in zip(upper_triangle(k), inputs["gram"], strict=True):
        gram[row][column] = gram[column][row] = float(text)
    return Round(
        names,
        tuple(float(item["tokens"]) for item in participants),
        _ints(inputs["local_steps"], k),
        tuple(int(item["steps"]) for item in participants),
        _ints(inputs["nonfinite_elems"], k),
        tuple(map(bool, _ints(inputs.get("all_zero", [0] * k), k))),
        tuple(map(tuple, gram)),
        frozenset(map(str, inputs["live"])),
        {str(name): float(text) for name, text in inputs["rates_tokens_per_s"].items()},
        {str(name): float(text) for name, text in inputs["push_intervals_s"].items()},
        float(inputs["round_tokens"]),
        inputs["settings"],
        inputs["detector"],
    )


def upper_triangle(k: int) -> list[tuple[int, int]]:
    """The places in a Gram matrix of k pushes that records hold, in their order."""
    return [*combinations_with_replacement(range(k), 2)]


def _ints(raw: Sequence[Any], k: int) -> tuple[int, ...]:
    if len(raw) != k:
        raise ValueError(f"{len(raw)} numbers for {k} participants")
    return tuple(map(int, raw))


SlaveMeasured = tuple[tuple[float, ...], tuple[int, ...], tuple[bool, ...]]
"""Of one round on one slave: the upper triangle of the Gram matrix; of each push its non-finite elements, and whether
all of it is 0."""


@dataclass(frozen=True)
class JudgedPush:
    """One participant as it is judged here."""

    G: float
    Gn: float
    # z, dev: NaN while undefined
    z: float
    dev: float
    bad: str  # "invalid", "gate", "score" or empty
    close: bool  # rounding decides whether it is bad, so both answers are right


def pushes_of(given: Round, memory: PenaltyMemory) -> list[JudgedPush]:
    """Apply the detector to every participant, with the memory before the round."""
    found = [_measured(given, memory, j) for j in range(len(given.names))]
    detector = given.settings["detector"]
    if detector == "off":
        return found
    pool = [*memory.norms, *(push.Gn for push in found if not push.bad)]
    gate = given.number("hard_gate") * statistics.median(pool) if len(pool) >= 3 else math.inf
    tau = threshold(given, memory)
    judged = []
    for push in found:
        if not push.bad:
            over, above = push.Gn > gate, push.z > tau
            at_gate, at_tau = near(push.Gn, gate), _near_score(push, push.z, tau)
            is_sure = (over and not at_gate) or (above and not at_tau) or not (at_gate or at_tau)
            push = replace(push, bad="gate" if over else "score" if above else "", close=not is_sure)
        judged.append(push)
    return judged


def _near_score(push: JudgedPush, a: float, b: float) -> bool:
    """Whether two scores are equal except for rounding: as differences, they have a larger error than `near` allows."""
    return near(a, b, RELATIVE * (1.0 + 2.0 * push.Gn / push.dev)) if push.dev > 0.0 else near(a, b)


def threshold(given: Round, memory: PenaltyMemory) -> float:
    """tau, the threshold of the scores."""
    beta, scores = given.number("beta"), memory.scores
    match given.settings["detector"]:
        case "off":
            return math.inf
        case "literal":
            return beta * max(scores) if scores else math.inf
        case "edit":
            return beta * max(1.0, statistics.pstdev(scores)) if scores else beta
        case "score":
            return beta * min(max(1.0, *scores), beta) if scores else beta
    raise ValueError(f"detector {given.settings['detector']!r} is not known")


def _measured(given: Round, memory: PenaltyMemory, j: int) -> JudgedPush:
    squared, T, nan = given.gram[j][j], given.T[j], math.nan
    G = math.sqrt(max(0.0, squared)) if math.isfinite(squared) else squared
    if given.nonfinite[j] > 0 or given.zero[j] or not math.isfinite(G) or not 0 < T <= MAX_TOKENS or G == 0:
        return JudgedPush(G, nan, nan, nan, "invalid", False)
    me = memory.of.get(given.names[j], ClusterMemory())
    literal = given.settings["detector"] == "literal"
    usual_T = me.T
    if usual_T is None or _other_steps(given, me, j):
        usual_T = _T_of_H(given, j)
    Gn = G if literal else G / max(1.0, T / usual_T)
    if me.n < given.number("warm_up_pushes"):
        return JudgedPush(G, Gn, nan, nan, "", False)
    dev = math.sqrt(me.V) if literal else max(math.sqrt(me.V), 0.05 * me.mu, 1e-12)
    return JudgedPush(G, Gn, (Gn - me.mu) / dev if dev else 0.0, dev, "", False)


def _T_of_H(given: Round, j: int) -> float:
    """The tokens of H steps, from those of the steps that the push made."""
    T, H, made = given.T[j], given.H[j], given.made[j]
    return T * H / made if 0 < H < made else T


def _other_steps(given: Round, me: ClusterMemory, j: int) -> bool:
    """Whether H changed so much that the usual T is no longer valid."""
    H = given.H[j]
    return me.H > 0 and H > 0 and abs(H - me.H) > given.number("steps_change") * me.H


def weights_of(given: Round, accepted: Sequence[int]) -> list[float]:
    if given.settings["weighting"] == "softmax":
        G = [math.sqrt(max(0.0, given.gram[j][j])) for j in accepted]
        parts = [math.exp(min(G) - g) for g in G]
    else:
        parts = [given.T[j] for j in accepted]
    return [part / sum(parts) for part in parts]


def merged_norm_of(given: Round, accepted: Sequence[int], weights: Sequence[float]) -> tuple[float, float]:
    """||d||, and its possible rounding error: opposite pushes nearly cancel."""
    terms = [
        w_j * w_i * given.gram[j][i]
        for j, w_j in zip(accepted, weights, strict=True)
        for i, w_i in zip(accepted, weights, strict=True)
    ]
    size = sum(map(abs, terms))
    norm = math.sqrt(max(0.0, sum(terms)))
    return norm, 1e-12 * size / norm if norm > 0.0 else 1e-6 * math.sqrt(size)


def clip_of(given: Round, memory: PenaltyMemory) -> float:
    if given.settings["clip_scope"] == "auto" and memory.merged:
        return statistics.median(memory.merged)
    return given.number("clip_norm")


def t_round_of(given: Round) -> float:
    rates, intervals = list(given.rates.values()), [s for s in given.intervals_s.values() if s > 0]
    if not rates or not intervals or min(rates) <= 0:
        return 0.0
    return sum(rates) * sum(intervals) / len(intervals)


def rho_of(given: Round, accepted: Sequence[int], quarantined: frozenset[str]) -> float:
    names, expected = {given.names[j] for j in accepted}, given.live - quarantined
    if not given.settings["participation_scaling"] or expected <= names:
        return 1.0
    T_round = given.round_tokens
    if 0 < T_round < math.inf:
        return min(1.0, sum(given.T[j] for j in accepted) / T_round)
    return len(names) / len(names | expected)


def step_of(given: Round, kappa: float, rho: float, before_v: int) -> dict[str, float]:
    """The coefficients that the slaves get (docs/algorithm.md, further outer optimizers)."""
    mu, scale = given.number("outer_momentum"), rho * kappa
    decay, lookahead, weight = mu, mu, 1.0
    match given.settings["outer_optimizer"]:
        case "heavy-ball":
            lookahead, weight = 1.0, 0.0
        case "averaging":
            decay = lookahead = 0.0
        case "delayed-nesterov":
            N = int(given.settings["delay_rounds"])
            scale /= N
            decay = mu if before_v % N == 0 else 1.0
            lookahead = mu if before_v % N == N - 1 else 0.0
        case _ if given.settings["momentum_scaling"] == "tokens" and rho != 1.0:
            decay = mu**rho
            lookahead = mu * (1.0 - decay) / (1.0 - mu)
    return {
        "scale": scale,
        "outer_lr": given.number("outer_lr"),
        "momentum_decay": decay,
        "momentum_lookahead": lookahead,
        "gradient_weight": weight,
    }


# ---- what is remembered after it ----


def after_commit(
    given: Round, memory: PenaltyMemory, pushes: Sequence[JudgedPush], accepted: set[str], merged: float
) -> PenaltyMemory:
    of = dict(memory.of)
    norms, scores = list(memory.norms), list(memory.scores)
    for j, (name, push) in enumerate(zip(given.names, pushes, strict=True)):
        if name in accepted:
            of[name] = replace(_learnt(given, memory, push, j), flags=0, score_flags=0, quarantined=False)
            norms.append(push.Gn)
            scores += [] if math.isnan(push.z) else [push.z]
        else:
            of[name] = _flagged(given, memory, push, j)
    window, rounds = int(given.settings["window_pushes"]), int(given.settings["clip_window_rounds"])
    return PenaltyMemory(of, tuple(norms[-window:]), tuple(scores[-window:]), (*memory.merged, merged)[-rounds:], 0)


def after_void(given: Round, memory: PenaltyMemory, pushes: Sequence[JudgedPush], accepted: set[str]) -> PenaltyMemory:
    """The memory after a VOID. accepted: by JUDGE, before a slave's step was not finite, by an unknown push's fault."""
    of = dict(memory.of)
    for j, (name, push) in enumerate(zip(given.names, pushes, strict=True)):
        if name not in accepted:
            of[name] = _flagged(given, memory, push, j)
    voids = memory.voids + 1
    if 0 < given.number("clear_after_voids") <= voids:
        return PenaltyMemory(of)
    return replace(memory, of=of, voids=voids)


def _learnt(given: Round, memory: PenaltyMemory, push: JudgedPush, j: int) -> ClusterMemory:
    me = memory.of.get(given.names[j], ClusterMemory())
    n = me.n + 1
    a = max(given.number("alpha"), 1.0 / n)
    if given.settings["detector"] == "literal" and n > 1:
        a = given.number("alpha")
    mu = a * push.Gn + (1.0 - a) * me.mu
    V = (1.0 - a) * me.V + a * (push.Gn - mu) ** 2
    if me.T is None or _other_steps(given, me, j):
        T, H = _T_of_H(given, j), given.H[j]
    else:
        T, H = a * given.T[j] + (1.0 - a) * me.T, me.H or given.H[j]
    return replace(me, n=n, mu=mu, V=V, T=T, H=H)


def _flagged(given: Round, memory: PenaltyMemory, push: JudgedPush, j: int) -> ClusterMemory:
    me = memory.of.get(given.names[j], ClusterMemory())
    if given.settings["detector"] == "literal" and push.bad != "invalid":
        me = _learnt(given, memory, push, j)
    me = replace(me, flags=me.flags + 1, score_flags=me.score_flags + 1 if push.bad == "score" else 0)
    if 0 < given.number("restart_after_rejections") <= me.score_flags:
        me = ClusterMemory(flags=me.flags, quarantined=me.quarantined)
    quarantined = me.quarantined or 0 < given.number("quarantine_after_flags") <= me.flags
    return replace(me, quarantined=quarantined)


# ---- record by record ----


class Judging:
    """Follows the records of one run and reports what in a judgement does not follow from the rules (section 7).

    memory: what the detector remembers now; None while that is not known, because earlier records are missing or do
    not contain it. recomputed: judgements that were computed again; blind: those of them whose accepted set could not
    be. old: judgements whose records have no inputs; holes: those of them that come after one that has them.
    """

    def __init__(self, whole: bool = True) -> None:
        self.memory: PenaltyMemory | None = PenaltyMemory({}) if whole else None
        self.recomputed = self.blind = self.old = self.holes = 0
        self._at: dict[PushState, PenaltyMemory | None] = {}
        self._after: PenaltyMemory | None = self.memory
        self._compared: set[PushState] = set()
        self._measured: dict[Pair, dict[str, SlaveMeasured | None]] = {}

    # ---- facts ----

    def lost_journal(self) -> None:
        """Note that the master's state came from slaves or a copy: its next judgement contains it."""
        self.memory = None

    def measured(
        self, slave: str, round_id: Pair, gram: Sequence[Any], nonfinite: Sequence[Any], zero: Sequence[Any] = ()
    ) -> None:
        """Add what a slave measured. Two different reports about one round are no evidence. zero: empty: of none."""
        of_none = [False] * len(nonfinite)
        said = (tuple(map(float, gram)), tuple(map(int, nonfinite)), tuple(map(bool, zero or of_none)))
        of_round = self._measured.setdefault(round_id, {})
        same = slave not in of_round or repr(of_round[slave]) == repr(said)
        of_round[slave] = said if same else None

    def moved(self, kind: str, now: PushState | None, origin: PushState | None) -> None:
        """Add a record: after a COMMIT or VOID with what judge() computed, else with the state at its origin."""
        match kind:
            case "COMMIT" | "VOID":
                self.memory = self._after
            case "ROLLBACK":
                self.memory = self._at.get(origin) if origin is not None else None
            case "ADOPT":
                self.memory = self._at.get(now) if now is not None else None
        if kind != "VOID" and now is not None:
            self._at.pop(now, None)
            self._at[now] = self.memory
            if len(self._at) > KEPT:
                self._compared.discard(oldest := next(iter(self._at)))
                del self._at[oldest]

    def ledger(self, detector: Fields, at: PushState | None = None) -> list[str] | None:
        """Compare the detector's state in a ledger, at a version or now. None when there is nothing to compare."""
        known = self.memory if at is None else self._at.get(at)
        if known is None or at in self._compared:
            return None
        if at is not None:
            self._compared.add(at)
        wrong = difference(known, memory_of(detector))
        return [f"the detector's state in the ledger does not follow from the rounds before: {wrong}"] if wrong else []

    # ---- judgements ----

    def judge(self, record: Fields, slaves: Sequence[str] | None = None) -> list[str] | None:
        """Sentences about what is wrong with a COMMIT's or VOID's judgement; None when it cannot be checked.

        slaves: those that hold the model, if what they measured is to be compared.
        """
        before, self._after = self.memory, None  # after a record that cannot be read, the memory is not known
        judgement, kind = record.get("judgement"), str(record["kind"])
        if judgement is None:
            self._after = before
            seed = kind == "COMMIT" and record.get("from_version") is None
            return None if seed else ["it was decided without a judgement"]
        inputs = judgement.get("inputs")
        if inputs is None or inputs["format"] != FORMAT:
            self.old += 1
            self.holes += inputs is None and self.recomputed > 0
            return None
        given = round_of(record["participants"], inputs)
        wrong = [*self._anchor(given), *self._as_measured(record, given, slaves)]
        accepted = [j for j, name in enumerate(given.names) if name in judgement["accepted"]]
        known = self.memory is not None
        # Without a memory, what needs none: numbers that no push can have.
        bare = (_measured(given, PenaltyMemory({}), j) for j in range(len(given.names)))
        pushes = [*bare] if self.memory is None else pushes_of(given, self.memory)
        self.recomputed += 1
        self.blind += not known
        wrong += self._wrong_threshold(given, judgement)
        wrong += _wrong_accepted(given, accepted, pushes, known, record)
        if accepted:
            wrong += self._wrong_numbers(given, accepted, judgement)
            wrong += _wrong_step(given, record)
        wrong += _wrong_norms(given, pushes, known, judgement)
        # Updated by what the record decided, so that one wrong judgement is reported once.
        names = {given.names[j] for j in accepted}
        if self.memory is None:
            self._after = None
        elif kind == "VOID":
            self._after = after_void(given, self.memory, pushes, names)
        else:
            self._after = after_commit(given, self.memory, pushes, names, float(judgement["merged_norm"]))
        return wrong[:MAX_SENTENCES]

    def _anchor(self, given: Round) -> list[str]:
        """Take over the detector's state in the record; it must follow from the records before, if these are known."""
        if given.detector is None:
            return []
        before, self.memory = self.memory, memory_of(given.detector)
        wrong = difference(before, self.memory) if before is not None else ""
        return [f"what the detector remembered does not follow from the rounds before: {wrong}"] if wrong else []

    def _as_measured(self, record: Fields, given: Round, slaves: Sequence[str] | None) -> list[str]:
        """Check that the Gram matrix is the sum of what the slaves measured."""
        round_id = (int(record["round"][0]), int(record["round"][1]))
        said = self._measured.pop(round_id, None)
        if said is None or slaves is None or any(said.get(name) is None for name in slaves):
            return []
        parts = [part for name in slaves if (part := said[name]) is not None]
        k = len(given.names)
        upper = upper_triangle(k)
        if any(len(gram) != len(upper) or not len(bad) == len(zero) == k for gram, bad, zero in parts):
            return ["slaves measured another number of pushes than its record names"]
        for index, (row, column) in enumerate(upper):
            terms, value = [gram[index] for gram, *_ in parts], given.gram[row][column]
            total = sum(terms)
            if not near(max(total, 0.0) if row == column else total, value, 1e-12 * sum(map(abs, terms))):
                return [f"entry {index} of its Gram matrix is {value!r}, but the slaves measured {total!r}"]
        counts = tuple(sum(bad[j] for _, bad, _ in parts) for j in range(k))
        if counts != given.nonfinite:
            return [f"it counts {given.nonfinite} elements that are not finite, but the slaves measured {counts}"]
        zero = tuple(all(of_push) for of_push in zip(*(each for *_, each in parts), strict=True))
        if zero != given.zero:
            return [f"it says {given.zero} of pushes that are all zero, but the slaves measured {zero}"]
        return []

    def _wrong_threshold(self, given: Round, judgement: Fields) -> list[str]:
        if self.memory is None:
            return []
        said, tau = judgement["threshold"], threshold(given, self.memory)
        return [] if near(float(said), tau, 1e-6) else [f"its threshold is {said}, but the last scores make it {tau!r}"]

    def _wrong_numbers(self, given: Round, accepted: Sequence[int], judgement: Fields) -> list[str]:
        """Check weights, merged norm, kappa, T_round and rho, each from the ones before it as the record has them."""
        wrong = list[str]()
        said, weights = judgement["weights"], weights_of(given, accepted)
        if len(said) != len(weights):
            return [f"it has {len(said)} weights for {len(weights)} accepted pushes"]
        for j, a, b in zip(accepted, said, weights, strict=True):
            if not near(float(a), b):
                name, by = given.names[j], given.settings["weighting"]
                return [f"the weight of cluster {name} is {a}, but {by} of what was accepted makes it {b!r}"]
        norm = merged_norm_of(given, accepted, weights)
        merged, kappa, rho = float(judgement["merged_norm"]), judgement["kappa"], judgement["rho"]
        if not near(merged, *norm):
            wrong.append(f"its merged norm is {merged!r}, but weights and Gram matrix make it {norm[0]!r}")
        if self.memory is not None or given.settings["clip_scope"] != "auto":
            clip = clip_of(given, self.memory or PenaltyMemory({}))
            if not near(float(judgement["clip_norm"]), clip):
                wrong.append(f"its clip is {judgement['clip_norm']}, but the settings make it {clip!r}")
            expected = min(1.0, clip / max(merged, 1e-12))
            if not near(float(kappa), expected):
                wrong.append(f"its kappa is {kappa}, but clip {clip:g} and its merged norm make it {expected!r}")
        t_round = t_round_of(given)
        if not near(given.round_tokens, t_round):
            wrong.append(f"its T_round is {given.round_tokens!r}, but rates and push intervals make it {t_round!r}")
        if self.memory is not None:
            expected = rho_of(given, accepted, self.memory.quarantined)
            if not near(float(rho), expected):
                wrong.append(f"its rho is {rho}, but live clusters and accepted tokens make it {expected!r}")
        return wrong


def _wrong_accepted(
    given: Round, accepted: Sequence[int], pushes: Sequence[JudgedPush], known: bool, record: Fields
) -> list[str]:
    """known: whether the detector's memory was."""
    kind, judgement = str(record["kind"]), record["judgement"]
    names = [given.names[j] for j in accepted]
    rejected = [name for name in given.names if name not in names]
    verdicts = [str(item["push"][0]) for item in record["participants"] if item["verdict"] == "APPLIED"]
    wrong = []
    if list(judgement["accepted"]) != names or [item[0] for item in judgement["rejected"]] != rejected:
        wrong.append(f"it judged {judgement['accepted']} and {judgement['rejected']}, but its pushes are {given.names}")
    if verdicts != (names if kind == "COMMIT" else []) or (kind == "COMMIT" and not names):
        wrong.append(f"it applies {', '.join(verdicts) or 'nothing'}, but {', '.join(names) or 'nothing'} was accepted")
    for j, push in enumerate(pushes):
        name, taken = given.names[j], j in accepted
        if taken == (not push.bad) or push.close or not (known or push.bad):
            continue
        said, why = ("accepted", _why_bad(push, given)) if taken else ("excluded", "nothing is wrong with its push")
        wrong.append(f"cluster {name} is {said}, but {why}")
    return wrong


def _why_bad(push: JudgedPush, given: Round) -> str:
    match push.bad:
        case "invalid":
            return f"its norm is {push.G:g}, or it counts no tokens or elements that are not finite"
        case "gate":
            return f"its norm {push.Gn:.6g} is above {given.number('hard_gate'):g} times the median of recent ones"
    return f"its score {push.z:.6g} is above the threshold"


def _wrong_norms(given: Round, pushes: Sequence[JudgedPush], known: bool, judgement: Fields) -> list[str]:
    """Check the norms in the record by the Gram matrix's diagonal, and the scores by the memory."""
    rows = judgement["norms"]
    if [row[0] for row in rows] != list(given.names):
        return [f"its norms are of {[row[0] for row in rows]}, but its pushes of {list(given.names)}"]
    for (name, norm, score, *_), push in zip(rows, pushes, strict=True):
        if not near(float(norm), push.G):
            return [f"the norm of cluster {name} is {norm}, but the Gram matrix makes it {push.G!r}"]
        if known and not _near_score(push, float(score), push.z):
            return [f"the score of cluster {name} is {score}, but what the detector remembers makes it {push.z!r}"]
    return []


def _wrong_step(given: Round, record: Fields) -> list[str]:
    """Check that scale, rates and coefficients follow from kappa, rho and the settings."""
    judgement, before = record["judgement"], record.get("from_version")
    said = judgement["outer_step"]
    if said is None:
        return ["it was committed without a step"] if record["kind"] == "COMMIT" else []
    if before is None:
        return []  # a VOID after PREPARE does not name its version
    expected = step_of(given, float(judgement["kappa"]), float(judgement["rho"]), int(before[1]))
    return [
        f"its {name} is {said[name]}, but settings, kappa and rho make it {value!r}"
        for name, value in expected.items()
        if not near(float(said[name]), value)
    ]
