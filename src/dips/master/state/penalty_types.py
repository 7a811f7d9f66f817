"""The inputs and outputs of judging a round: values only, no rule.

Legend: k participants in cluster-id order; G_j norm of a pseudo-gradient, Gn_j the same for an average number
of tokens, z_j its score, T_j tokens.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dips.core.errors import ConfigError
from dips.core.messages import Alarm
from dips.master.state.reasons import Reason

# ---- penalty config --------------------------------------------------------------------------------------------------
#
# The settings of the pseudo-gradient penalty and of the merge (docs/algorithm.md, paper 4.1), and their presets.
#
# Separate from penalty.py, so that a configuration can be made, checked and printed without a judgement.
# It must never hold a rule: it says which rule applies and with what numbers.


DETECTORS = ("score", "literal", "edit", "off")
WEIGHTINGS = ("tokens", "softmax")
CLIP_SCOPES = ("global", "auto")
CLIP_SCOPES_LATER = ("slave", "layer")
MOMENTUM_SCALINGS = ("off", "tokens")
OUTER_OPTIMIZERS = ("nesterov", "heavy-ball", "delayed-nesterov", "averaging")

OPTIMIZER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "averaging": {"outer_momentum": 0.0},
    "delayed-nesterov": {"participation_scaling": False},
}
"""The values that an outer optimizer changes in any preset, unless they are given explicitly. Delayed Nesterov
divides each round's merge by delay_rounds; rho in addition would count the missing clusters twice."""


@dataclass(frozen=True)
class PenaltyConfig:
    """One run's penalty settings. The defaults are the preset `safe`; raises ConfigError for an impossible value."""

    preset: str = "safe"  # where the values came from; nothing is decided by it
    # `score` is that of docs/algorithm.md; `literal` the paper's text without changes; `edit` the rule of EDiT; `off`
    # makes only the checks that every detector makes (finite, positive norm and tokens).
    detector: str = "score"
    weighting: str = "tokens"  # w_j = T_j / sum T; `softmax`: w = softmax(-G)
    participation_scaling: bool = True  # rho as in docs/algorithm.md; false: rho = 1
    # `tokens` decays the momentum by mu^rho for each round, so that a partial round forgets only a part.
    momentum_scaling: str = "off"
    outer_optimizer: str = "nesterov"  # or another of OUTER_OPTIMIZERS (docs/algorithm.md, further outer optimizers)
    delay_rounds: int = 4  # rounds of one cycle of delayed Nesterov
    outer_momentum: float = 0.8  # mu_o, in [0, 1); 0 with `averaging`
    clip_norm: float = 1.0  # the bound of the merged pseudo-gradient's norm; infinity: nothing is clipped
    # `auto` clips at the median norm of the last clip_window_rounds merges, and at clip_norm until there is one.
    clip_scope: str = "global"
    clip_window_rounds: int = 32
    beta: float = 3.0  # the paper's threshold factor
    alpha: float = 0.02  # the paper's smallest average factor
    warm_up_pushes: int = 8  # accepted pushes of a cluster before its score is defined
    window_pushes: int = 64  # accepted norms and scores, of all clusters together, that are remembered
    hard_gate: float = 10.0  # a norm above this many times the median of recent ones is refused; infinity: never
    restart_after_rejections: int = 8  # score rejections of one cluster in a row restart its statistics; 0: never
    clear_after_voids: int = 3  # VOID rounds in a row that clear what the clusters share; 0: never
    quarantine_after_flags: int = 3  # rejections of one cluster in a row that quarantine it; 0: never
    # A larger relative change of local steps restarts a cluster's average of tokens, but not that of its norms: with
    # 0.25, as in earlier releases, up to eight pushes of each cluster were excluded after the run's H was raised.
    steps_change: float = math.inf
    # The alarm of a direction: the median cosine of a cluster's last pushes with the others' movement is below
    # cosine_alarm, or below cosine_share of what is usual among the others, once enough cosines were known.
    cosine_alarm: float = -0.2
    cosine_share: float = 0.15
    cosine_window_pushes: int = 7
    cosine_warm_up_pushes: int = 8

    def __post_init__(self) -> None:
        _check_preset(self.preset)
        _one_of("detector", self.detector, DETECTORS)
        _one_of("weighting", self.weighting, WEIGHTINGS)
        _one_of("momentum_scaling", self.momentum_scaling, MOMENTUM_SCALINGS)
        _one_of("outer_optimizer", self.outer_optimizer, OUTER_OPTIMIZERS)
        if self.clip_scope in CLIP_SCOPES_LATER:
            raise ConfigError(
                f"clip_scope {self.clip_scope!r} is not available in this release: use 'global' (one norm over the "
                "whole model) or 'auto'"
            )
        _one_of("clip_scope", self.clip_scope, CLIP_SCOPES)
        _in_range("outer_momentum", self.outer_momentum, 0.0, math.nextafter(1.0, 0.0))
        _in_range("alpha", self.alpha, math.ulp(0.0), 1.0)
        _in_range("cosine_alarm", self.cosine_alarm, -1.0, 1.0)
        _in_range("cosine_share", self.cosine_share, 0.0, 1.0)
        _in_range("beta", self.beta, 1.0, math.inf)
        _in_range("hard_gate", self.hard_gate, 1.0, math.inf)
        _in_range("clip_norm", self.clip_norm, math.ulp(0.0), math.inf)
        _in_range("steps_change", self.steps_change, 0.0, math.inf)
        counts = ("warm_up_pushes", "window_pushes", "clip_window_rounds", "delay_rounds")
        for name in (*counts, "cosine_window_pushes", "cosine_warm_up_pushes"):
            _in_range(name, getattr(self, name), 1, math.inf)
        for name in ("restart_after_rejections", "clear_after_voids", "quarantine_after_flags"):
            _in_range(name, getattr(self, name), 0, math.inf)
        optimizer = self.outer_optimizer
        if optimizer == "averaging" and self.outer_momentum != 0:
            raise ConfigError(
                f"outer_momentum is {self.outer_momentum}, and outer_optimizer 'averaging' has no momentum: leave "
                "outer_momentum out, or take 'nesterov' or 'heavy-ball'"
            )
        if optimizer != "nesterov" and self.momentum_scaling != "off":
            raise ConfigError(
                f"momentum_scaling {self.momentum_scaling!r} is made for outer_optimizer 'nesterov', and it is "
                f"{optimizer!r}: set momentum_scaling to 'off', or take 'nesterov'"
            )

    @classmethod
    def of(cls, preset: str, **knobs: Any) -> PenaltyConfig:
        """The preset's values, replaced by `knobs` where given, and adapted to the outer optimizer.

        Raises ConfigError for an unknown name or value, and for knobs that contradict each other.
        """
        _check_preset(preset)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in knobs:
            _one_of("penalty knob", name, known)
        optimizer = knobs.get("outer_optimizer", "nesterov")
        if "delay_rounds" in knobs and optimizer != "delayed-nesterov":
            raise ConfigError(
                f"delay_rounds belongs to outer_optimizer 'delayed-nesterov', and it is {optimizer!r}: leave it out"
            )
        # Who names a bound means it for the whole run, and not only until there is a median.
        bound = {"clip_scope": "global"} if "clip_norm" in knobs else {}
        return dataclasses.replace(PRESETS[preset], **{**OPTIMIZER_DEFAULTS.get(optimizer, {}), **bound, **knobs})


def outer_lr_of(preset: str, optimizer: str) -> float:
    """The outer learning rate when none is given (the master's, like dynamic local steps)."""
    if optimizer == "averaging":
        return 1.0
    return 0.9 if preset == "steady" else 0.7


def dynamic_local_steps_of(preset: str) -> bool:
    """Whether a preset also turns dynamic local steps on (they are the master's, not the penalty's)."""
    _check_preset(preset)
    return preset in ("steady", "dynamic")


def _check_preset(name: str) -> None:
    if name == "dips":  # the name that `dips compare` gives to the defaults; earlier releases took it for `safe`
        raise ConfigError(
            "preset 'dips' is no longer known: it was another name of 'safe'. Write 'safe' to keep its rules, or leave "
            "preset out: the default, 'steady', is what `dips compare` calls dips"
        )
    _one_of("preset", name, PRESET_NAMES)


def _one_of(what: str, value: object, known: tuple[str, ...] | list[str]) -> None:
    if value in known:
        return
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{what} {value!r} is not known; it is one of {', '.join(known)}{hint}")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also true for NaN
        raise ConfigError(f"{name} is {value!r}; it must be between {low:g} and {high:g}")


PRESET_NAMES = ("steady", "dynamic", "safe", "paper", "paper-literal", "edit")

DEFAULT_PRESET = "steady"
EARLIER_DEFAULT_PRESET = "dynamic"
"""The default of the releases whose ledgers do not name the preset."""

_SAFE = PenaltyConfig()

PRESETS: Mapping[str, PenaltyConfig] = {
    "safe": _SAFE,
    "steady": dataclasses.replace(_SAFE, preset="steady", clip_scope="auto", outer_momentum=0.6),
    "dynamic": dataclasses.replace(_SAFE, preset="dynamic", clip_scope="auto"),
    "paper": dataclasses.replace(_SAFE, preset="paper", participation_scaling=False),
    "paper-literal": dataclasses.replace(
        _SAFE,
        preset="paper-literal",
        detector="literal",
        participation_scaling=False,
        hard_gate=math.inf,
        warm_up_pushes=1,
        restart_after_rejections=0,
        clear_after_voids=0,
        quarantine_after_flags=0,
    ),
    "edit": dataclasses.replace(
        _SAFE,
        preset="edit",
        detector="edit",
        weighting="softmax",
        participation_scaling=False,
        clip_norm=10.0,
    ),
}
"""`safe`: docs/algorithm.md. `dynamic`: safe, with dynamic local steps and the clip at the median of recent norms.
`steady`: dynamic, with less momentum and a larger outer learning rate (docs/decisions/0080).
`paper`: safe with rho = 1. `paper-literal`: also the detector as printed. `edit`: the detector, weights and clip of
EDiT, and rho = 1."""


# ---- penalty statistics ----------------------------------------------------------------------------------------------
#
# The detector's memory: a few numbers for each cluster and three short histories that all clusters share.
#
# Every COMMIT record and every journaled VOID contains all of it. So it is immutable, holds finite floats only, orders
# its clusters by id, and does not lose a bit in JSON. It must never be changed in any other way.


@dataclass(frozen=True)
class ClusterStatistics:
    """One cluster's statistics."""

    accepted: int = 0  # n_j, accepted pushes since the statistics (re)started
    mean: float = 0.0  # mu_j of the norms Gn
    variance: float = 0.0  # V_j
    mean_tokens: float | None = None  # Tbar_j; None before the first accepted push and after a restart
    steps: int = 0  # the local steps for which mean_tokens holds
    flags_in_a_row: int = 0
    score_rejections_in_a_row: int = 0
    quarantined: bool = False
    cosines: tuple[float, ...] = ()  # of the last accepted pushes whose cosine was known, oldest first
    cosine_rounds: int = 0  # how many such pushes there were
    cosine_alarmed: bool = False  # the direction alarm is active
    # Gn_j, z_j and the cosine of the last judged push, rejected ones too; None where not finite or not known. For
    # people: nothing is decided by them.
    last_norm: float | None = None
    last_score: float | None = None
    last_cosine: float | None = None

    @property
    def usual_cosine(self) -> float:
        """The median of the last cosines, so that a few odd rounds have little effect; NaN before the first."""
        return statistics.median(self.cosines) if self.cosines else math.nan

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "cosines": list(self.cosines)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClusterStatistics:
        """Also reads records with an average in place of the last cosines: the cosines then start again."""
        if "cosine_mean" in data:
            data = {k: v for k, v in data.items() if k not in ("cosine_mean", "cosine_rounds", "cosine_alarmed")}
        return cls(**{**data, "cosines": tuple(data.get("cosines", ()))})

    def restarted(self) -> ClusterStatistics:
        """The statistics without norms and tokens; flags, quarantine and cosines are kept."""
        return dataclasses.replace(
            self, accepted=0, mean=0.0, variance=0.0, mean_tokens=None, steps=0, score_rejections_in_a_row=0
        )


NEW_CLUSTER = ClusterStatistics()


@dataclass(frozen=True)
class DetectorState:
    """Everything that judge() remembers between rounds; histories are oldest first."""

    clusters: tuple[tuple[str, ClusterStatistics], ...] = ()  # by cluster id
    norms: tuple[float, ...] = ()  # Gn_j of the last accepted pushes of all clusters
    scores: tuple[float, ...] = ()  # z_j of the same
    merged_norms: tuple[float, ...] = ()  # ||d|| of the last committed rounds, before the clip
    voids_in_a_row: int = 0  # VOID rounds since the last COMMIT

    @classmethod
    def empty(cls) -> DetectorState:
        return cls()

    def of(self, cluster: str) -> ClusterStatistics:
        """The cluster's statistics; those of a new cluster if it is not known."""
        return dict(self.clusters).get(cluster, NEW_CLUSTER)

    @property
    def quarantined(self) -> frozenset[str]:
        return frozenset(cluster for cluster, statistics in self.clusters if statistics.quarantined)

    def with_clusters(self, changed: Mapping[str, ClusterStatistics]) -> DetectorState:
        """The same with some clusters' statistics replaced or added."""
        merged = {**dict(self.clusters), **changed}
        return dataclasses.replace(self, clusters=tuple(sorted(merged.items())))

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; json.dumps writes each float so that it reads back to the same
        bits."""
        return {
            "clusters": {cluster: known.to_json() for cluster, known in self.clusters},
            "norms": list(self.norms),
            "scores": list(self.scores),
            "merged_norms": list(self.merged_norms),
            "voids_in_a_row": self.voids_in_a_row,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DetectorState:
        clusters = sorted(data["clusters"].items())
        return cls(
            clusters=tuple((cluster, ClusterStatistics.from_json(known)) for cluster, known in clusters),
            norms=tuple(data["norms"]),
            scores=tuple(data["scores"]),
            merged_norms=tuple(data["merged_norms"]),
            voids_in_a_row=data["voids_in_a_row"],
        )


# ---- penalty types ---------------------------------------------------------------------------------------------------


INPUTS_FORMAT = 1
"""The format of a record's judgement inputs (docs/algorithm.md, the record of a round)."""


@dataclass(frozen=True)
class Participant:
    """One sealed push."""

    cluster: str
    tokens: float  # T_j
    nonfinite_elems: int  # over all slaves
    local_steps: int  # H_j, the steps that it was asked to make
    made_steps: int = 0  # those that it made, as many or more; 0: unknown
    all_zero: bool = False  # every trained element is 0, on every slave

    @property
    def tokens_for_local_steps(self) -> float:
        """The tokens that it would have counted for H_j steps; the cluster's usual number while no mean is known."""
        more = 0 < self.local_steps < self.made_steps
        return self.tokens * self.local_steps / self.made_steps if more else self.tokens


@dataclass(frozen=True)
class ParticipantMeasure:
    """The measurements of one participant; NaN where undefined."""

    cluster: str
    norm: float
    scaled_norm: float
    score: float
    cosine: float  # of its update with that of the others (master/state/penalty_detect.py)


@dataclass(frozen=True)
class Judgement:
    """The verdict on a round. `accepted` empty means VOID. All in cluster-id order."""

    accepted: tuple[str, ...]
    rejected: Mapping[str, Reason] = field(hash=False)  # a judgement is a key in a search
    weights: tuple[float, ...]  # one for each accepted cluster, adding up to 1
    kappa: float
    rho: float
    merged_norm: float
    clip_norm: float
    threshold: float  # tau of this round
    measures: tuple[ParticipantMeasure, ...]
    next_state_if_committed: DetectorState
    next_state_if_void: DetectorState
    # For a person, if the round ends as judged: COMMIT when something is accepted, else VOID.
    alarms: tuple[Alarm, ...]
    alarms_if_void: tuple[Alarm, ...]  # those to use when PREPARE turns it into a VOID
    quarantined: frozenset[str]  # after the round ends as judged

    @property
    def scale(self) -> float:
        """rho kappa: the clip comes first, on the unscaled merge."""
        return self.rho * self.kappa


@dataclass(frozen=True)
class JudgeInputs:
    """The inputs of a judgement, in addition to the pushes' tokens: the record of the round carries them, so that the
    judgement can be computed again."""

    config: PenaltyConfig
    outer_lr: float  # of the step
    participants: tuple[Participant, ...]
    gram: tuple[tuple[float, ...], ...]
    live: tuple[str, ...]  # the live clusters that are not drained, those in quarantine too
    rates_tokens_per_s: tuple[tuple[str, float], ...]  # with push_intervals_s the inputs of round_tokens
    push_intervals_s: tuple[tuple[str, float], ...]
    round_tokens: float  # T_round
    # The state before, where it does not follow from the records before: in a master's first judgement, and after
    # another history was taken over.
    detector: DetectorState | None

    def to_json(self) -> dict[str, object]:
        """Floats as repr text, like all floats of a record; the Gram matrix as its upper triangle, row by row."""
        k = len(self.participants)
        settings = {name: _text(value) for name, value in dataclasses.asdict(self.config).items()}
        zero = [item.all_zero for item in self.participants]
        return {
            "format": INPUTS_FORMAT,
            "settings": settings | {"outer_lr": repr(self.outer_lr)},
            "gram": [repr(self.gram[row][column]) for row in range(k) for column in range(row, k)],
            "nonfinite_elems": [item.nonfinite_elems for item in self.participants],
            "local_steps": [item.local_steps for item in self.participants],
            "live": list(self.live),
            "rates_tokens_per_s": {name: repr(rate) for name, rate in self.rates_tokens_per_s},
            "push_intervals_s": {name: repr(interval_s) for name, interval_s in self.push_intervals_s},
            "round_tokens": repr(self.round_tokens),
            "detector": None if self.detector is None else self.detector.to_json(),
            **({"all_zero": zero} if any(zero) else {}),  # earlier releases know no such push
        }


def _text(value: object) -> object:
    return repr(value) if isinstance(value, float) else value
