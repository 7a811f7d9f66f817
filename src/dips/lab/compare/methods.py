"""The methods of a comparison, as settings of `dips master`, so that what is compared is what would run.

Only data parallel has no master; it is computed by dips.lab.compare.engine. It must never hold a number that
belongs to the set-up (steps, tokens, links): those are the same for all methods (dips.lab.compare.setup).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dips.core.errors import ConfigError

Setting = str | int | float | bool
MethodKind = Literal["servers", "data parallel"]


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str
    title: str
    about: str
    kind: MethodKind
    master: Mapping[str, Setting]  # settings by the names of `dips master`; they override the set-up's
    wire_dtype: str = "float32"  # the clusters' own setting

    def flags(self) -> tuple[str, ...]:
        """These settings as flags of `dips master`."""
        return tuple(_flag(name, value) for name, value in self.master.items())

    def flags_of_clusters(self) -> tuple[str, ...]:
        """The flags with which every cluster is started in addition."""
        return () if self.wire_dtype == "float32" else (_flag("wire_dtype", self.wire_dtype),)


def _flag(name: str, value: Setting) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value!r}" if isinstance(value, str) and " " in value else f"--{option} {value}"


def _servers(name: str, title: str, about: str, **master: Setting) -> Method:
    """A method of other settings than the default's; it waits for push, verdict and pull unless it says otherwise."""
    return Method(name, title, about, "servers", {"overlap": "none", **master})


def _written(name: str, wire_dtype: str, times: str) -> Method:
    """The default method with pushes in another wire type."""
    about = f"as dips; pushes are differences in {wire_dtype} with error feedback, {times} as long as float32"
    return Method(name, f"Di-PS, pushes in {wire_dtype}", about, "servers", {}, wire_dtype)


def _published(name: str, pull_wire: str, times: str) -> Method:
    """The default method with pulls in another wire type."""
    about = (
        f"as dips; pulls are differences in {pull_wire}, whose rounding slaves feed back, {times} as long as float32"
    )
    return Method(name, f"Di-PS, pulls in {pull_wire}", about, "servers", {"pull_wire": pull_wire})


_NO_PENALTY: Mapping[str, Setting] = {
    "detector": "off",
    "participation_scaling": False,
    "quarantine_after_flags": 0,
}
"""The outer step alone, as in DiLoCo. Numbers that are not finite are still refused."""

_ALL_TOGETHER: Mapping[str, Setting] = {
    "grace_s": "6 h",
    "round_timeout_s": "12 h",
    "verdict_wait_s": "1 d",
    "ticket_ttl_s": "60 s",
}
"""A window closes early when every live cluster has pushed, and no cluster trains before the verdict: these times mean
"no limit", in the order that the master requires."""

_METHODS = (
    Method(
        "dp",
        "data parallel",
        "one optimizer; the gradient is averaged over all clusters in every step",
        "data parallel",
        {},
    ),
    _servers(
        "diloco",
        "synchronous DiLoCo, not clipped",
        "every round waits for all clusters; no penalty, no clip (paper 5.1, baseline ii)",
        preset="paper",
        clip_norm=float("inf"),
        **_ALL_TOGETHER,
        **_NO_PENALTY,
    ),
    _servers(
        "diloco-clip",
        "synchronous DiLoCo, clip 1",
        "every round waits for all clusters; the merged update is clipped to norm 1",
        preset="paper",
        clip_norm=1.0,
        **_ALL_TOGETHER,
        **_NO_PENALTY,
    ),
    _servers(
        "async",
        "naive asynchronous DiLoCo",
        "each push is an outer step of its own, at once; no window, no penalty, no clip (paper 2.2; 5.1, baseline iii)",
        preset="paper",
        grace_s=0,
        clip_norm=float("inf"),
        **_NO_PENALTY,
    ),
    _servers("paper", "Di-PS as in the paper", "grace window, penalty with its repairs, clip; rho = 1", preset="paper"),
    _servers(
        "paper-literal",
        "Di-PS, penalty as printed",
        "as paper, with the detector exactly as the paper prints it",
        preset="paper-literal",
    ),
    Method(
        "dips",
        "Di-PS (the default)",
        "the preset steady: dynamic local steps, clip at the median of recent norms, rate 0.9, momentum 0.6; clusters "
        "train on while they push, while its verdict is awaited, and while they pull",
        "servers",
        {},
    ),
    _servers(
        "dynamic",
        "Di-PS, dynamic local steps",
        "the preset dynamic: clusters' pushes arrive together, momentum 0.8; clusters wait for push, verdict and pull",
        preset="dynamic",
    ),
    _servers(
        "dynamic-push",
        "Di-PS, dynamic, training through pushes",
        "as dynamic; clusters train on while they push, and wait for verdict and pull",
        preset="dynamic",
        overlap="push",
    ),
    _servers(
        "safe",
        "Di-PS, equal local steps",
        "the preset safe: paper, with participation scaling; clusters wait for push, verdict and pull",
        preset="safe",
    ),
    _servers(
        "safe-push",
        "Di-PS, equal local steps, training through pushes",
        "as safe; clusters train on while they push, and wait for verdict and pull",
        preset="safe",
        overlap="push",
    ),
    _servers(
        "safe-full",
        "Di-PS, equal local steps, training through everything",
        "as safe; clusters train on while they push, while its verdict is awaited, and while they pull",
        preset="safe",
        overlap="full",
    ),
    _servers(
        "edit", "EDiT's penalty", "threshold, softmax weights and clip 10 of EDiT, in the same windows", preset="edit"
    ),
    _servers(
        "delayed-nesterov",
        "Di-PS, delayed Nesterov",
        "each push is a step of its own, momentum every fourth (Async Local-SGD, arXiv 2401.09135)",
        preset="safe",
        grace_s=0,
        outer_optimizer="delayed-nesterov",
        delay_rounds=4,
    ),
    _servers(
        "heavy-ball",
        "Di-PS, heavy ball",
        "as safe, with momentum but without Nesterov's look ahead",
        preset="safe",
        outer_optimizer="heavy-ball",
    ),
    _servers(
        "averaging",
        "Di-PS, plain averaging",
        "as safe, without momentum: the merged parameters are used unchanged",
        preset="safe",
        outer_optimizer="averaging",
        outer_lr=1.0,
        outer_momentum=0.0,
    ),
    Method(
        "dips-share-0",
        "Di-PS, steps of an exchange dropped",
        "as dips; what clusters train while they exchange is not kept in their parameters",
        "servers",
        {"overlap_share": 0.0},
    ),
    Method(
        "dips-share-1",
        "Di-PS, steps of an exchange kept whole",
        "as dips; what clusters train while they exchange is kept in full",
        "servers",
        {"overlap_share": 1.0},
    ),
    Method(
        "dips-clip-1",
        "Di-PS, clip 1",
        "as dips; the merged update is clipped to norm 1, as in the other presets",
        "servers",
        {"clip_norm": 1.0},
    ),
    Method(
        "dips-no-clip",
        "Di-PS, not clipped",
        "as dips; the merged update is not clipped",
        "servers",
        {"clip_norm": float("inf")},
    ),
    _written("dips-bf16", "bfloat16", "half"),
    _written("dips-int8", "int8", "0.27 times"),
    _written("dips-int4", "int4", "0.14 times"),
    _published("dips-pull-bf16", "bfloat16", "half"),
    _published("dips-pull-int8", "int8", "0.27 times"),
    _published("dips-pull-int4", "int4", "0.14 times"),
    Method(
        "dips-both-int4",
        "Di-PS, pushes and pulls in int4",
        "as dips; both directions as in dips-int4 and dips-pull-int4",
        "servers",
        {"pull_wire": "int4"},
        "int4",
    ),
)

METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _METHODS})
"""Methods by name, in the order of the tables."""


def find_method(name: str) -> Method:
    """The method of this name. Raises ConfigError, with the nearest name."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(METHODS)}"
    raise ConfigError(f"there is no method {name!r}: {hint}")


# ---- inject ----------------------------------------------------------------------------------------------------------
#
# Injects bad pushes: what a bad cluster pushes instead of what it trained, and when.
#
# The damage is done to the push alone. The cluster itself keeps training undamaged, as with a transfer or
# hardware that spoils what it sends; so a push after the bad ones is good.


F32 = NDArray[np.float32]

KINDS = ("nan", "x30", "flip", "noise")
"""Kinds: elements that are NaN; the update times thirty; the opposite update; a random direction of the same length."""

HUGE = 30.0
NAN_ELEMS = 8
"""The number of NaN elements: a single one must be enough to be noticed, in any block."""


@dataclass(frozen=True)
class Injection:
    """Which cluster pushes what, and when: the pushes of a cluster are numbered from 1."""

    kind: str
    cluster: int = 0  # its index
    # the first bad one, later than the norms' warm-up of 8. Then bad_run bad pushes and good_run good ones by turns,
    # fewer than the 8 in a row after which a cluster's statistics begin again. The defaults spoil 17 of a cluster's
    # first 35 pushes.
    first_push: int = 10
    bad_run: int = 5
    good_run: int = 3

    def __post_init__(self) -> None:
        """Check the fields. Raises ConfigError for an unknown kind and for numbers that name no push."""
        if self.kind not in KINDS:
            raise ConfigError(f"injection {self.kind!r} is not known: choose one of {', '.join(KINDS)}")
        if self.cluster < 0 or min(self.first_push, self.bad_run, self.good_run) < 1:
            raise ConfigError(
                f"{self} names no push: give a cluster from 0, and first_push, bad_run and good_run from 1"
            )

    def is_bad(self, n_push: int) -> bool:
        """Whether the n-th push of that cluster, counted from 1, is spoilt."""
        place = n_push - self.first_push
        return place >= 0 and place % (self.bad_run + self.good_run) < self.bad_run

    def corrupt(self, n_push: int, push: F32, base: F32, seed: int) -> bool:
        """Spoil the n-th push in place if it is a bad one; returns whether it is. The same seed spoils alike.

        push: the vector to be sent; base: the version that the cluster last pulled; both (n_elems,) float32.
        """
        if not self.is_bad(n_push):
            return False
        rng = np.random.default_rng((seed, n_push))
        match self.kind:
            case "nan":
                push[rng.integers(len(push), size=NAN_ELEMS)] = np.nan
            case "x30":
                push[:] = base + np.float32(HUGE) * (push - base)
            case "flip":
                push[:] = base - (push - base)
            case "noise":
                norm, direction = float(np.linalg.norm(push - base)), rng.standard_normal(len(push), dtype=np.float32)
                push[:] = base + direction * np.float32(norm / float(np.linalg.norm(direction)))
        return True
