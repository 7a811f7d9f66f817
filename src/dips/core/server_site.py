"""Chooses the site for the parameter servers: the one whose links serve the training best (paper 3.1).

Pure: an operator can decide before anything runs. It must never contact a site; bandwidths and throughputs are what the
operator measured.

Legend: N sites with CPU servers, M training clusters; B[i][j] Gbit/s between the CPU servers of site i and
the training cluster j; p[j] tokens/s of training cluster j. A cluster pushes as often as it has trained, so
the demand that site i can serve is B_i^T p = sum over j of B[i][j] p[j], and the best site is argmax_i B_i^T
p. (The paper calls B_i a column, but its B_ij has the server's site first: with unequal directions the row is
what is meant.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from dips.core.config import Knobs, SettingsFile
from dips.core.errors import ConfigError
from dips.core.units import validating


@dataclass(frozen=True)
class SiteChoice:
    """The chosen site."""

    index: int  # of the best site
    demand: tuple[float, ...]  # B_i^T p of every site, in Gbit/s x tokens/s


Number = Annotated[float, Field(strict=True)]
"""A number as such: true is none."""


class Sites(Knobs):
    """The table [sites] of a file: N sites with CPU servers, and M training clusters."""

    names: Annotated[tuple[str, ...], Field(min_length=1)] = Field(description="names of the sites")
    clusters: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="names of the training clusters; where they are the sites, leave it out"
    )
    bandwidth_gbps: tuple[tuple[Number, ...], ...] = Field(
        description="a row for each site: Gbit/s between its CPU servers and each training cluster"
    )
    tokens_per_s: tuple[Number, ...] = Field(description="training speed of each cluster")

    @model_validator(mode="before")
    @classmethod
    def _clusters_are_the_sites(cls, given: dict[str, object]) -> dict[str, object]:
        return {"clusters": given["names"], **given} if "names" in given else given

    @field_validator("names", "clusters")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) != len(names):
            raise ValueError("has a name twice")
        return names

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.names) != len(self.bandwidth_gbps):
            raise ValueError(f"names has {len(self.names)} sites, bandwidth_gbps has {len(self.bandwidth_gbps)} rows")
        if len(self.clusters) != len(self.tokens_per_s):
            raise ValueError(
                f"tokens_per_s has {len(self.tokens_per_s)} numbers for {len(self.clusters)} clusters "
                f"({', '.join(self.clusters)})"
            )
        validating(self.choice)()
        return self

    def choice(self) -> SiteChoice:
        return choose_server_site(self.bandwidth_gbps, self.tokens_per_s)

    def explain(self) -> str:
        """A table of all sites, best first, and one sentence, as text."""
        choice = self.choice()
        order = sorted(range(len(self.names)), key=lambda i: (-choice.demand[i], i))
        width = max(len("site"), *(len(name) for name in self.names))
        best = choice.demand[choice.index]
        lines = [f"{'site':<{width}}  demand B_i^T p  of the best"]
        lines += [
            f"{self.names[i]:<{width}}  {choice.demand[i]:>14.6g}  {choice.demand[i] / best:>11.1%}" for i in order
        ]
        parts = zip(self.clusters, self.bandwidth_gbps[choice.index], self.tokens_per_s, strict=True)
        terms = " + ".join(f"{gbps:g} x {tokens:g} ({name})" for name, gbps, tokens in parts)
        demand = choice.demand[choice.index]
        return "\n".join([*lines, f"Place the parameter servers at {self.names[choice.index]}: {terms} = {demand:.6g}"])

    def to_json(self) -> dict[str, Any]:
        """For --json: the chosen site, its index, and the demand of every site by name."""
        choice = self.choice()
        return {
            "site": self.names[choice.index],
            "index": choice.index,
            "demand": dict(zip(self.names, choice.demand, strict=True)),
        }


def choose_server_site(bandwidth_gbps: Sequence[Sequence[float]], tokens_per_s: Sequence[float]) -> SiteChoice:
    """The site i that maximises B_i^T p; the lowest index of equals.

    bandwidth_gbps: B, N rows of M; tokens_per_s: p, M. Raises ConfigError for shapes that do not fit, for
    numbers that are negative or not finite, and when no site has any demand at all (then nothing
    distinguishes them).
    """
    _check_vector("tokens_per_s", tokens_per_s)
    if not bandwidth_gbps:
        raise ConfigError("bandwidth_gbps has no rows: give one row for each site that has CPU servers")
    for i, row in enumerate(bandwidth_gbps):
        if len(row) != len(tokens_per_s):
            raise ConfigError(
                f"bandwidth_gbps row {i} has {len(row)} numbers, but tokens_per_s has {len(tokens_per_s)}: give one "
                "for each training cluster"
            )
        _check_vector(f"bandwidth_gbps row {i}", row)
    demand = tuple(math.fsum(b * p for b, p in zip(row, tokens_per_s, strict=True)) for row in bandwidth_gbps)
    if max(demand) <= 0.0:
        raise ConfigError("every site's demand is 0: state at least one bandwidth and the tokens/s of its cluster")
    return SiteChoice(demand.index(max(demand)), demand)


def from_toml(path: Path) -> Sites:
    """Read the table [sites] of a file. Raises ConfigError that names the file and the key."""
    return SettingsFile.read(path).settings(Sites, "sites")


def _check_vector(name: str, values: Sequence[float]) -> None:
    if not values:
        raise ConfigError(f"{name} is empty: give one number for each training cluster")
    for j, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} has {value!r} at place {j}; it must be finite and not negative")
