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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dips.core.config import read_toml
from dips.core.errors import ConfigError

KEYS = ("names", "clusters", "bandwidth_gbps", "tokens_per_s")


@dataclass(frozen=True)
class SiteChoice:
    """The chosen site."""

    index: int  # of the best site
    demand: tuple[float, ...]  # B_i^T p of every site, in Gbit/s x tokens/s


@dataclass(frozen=True)
class Sites:
    """The table [sites] of a file."""

    names: tuple[str, ...]  # N sites
    clusters: tuple[str, ...]  # M training clusters (the sites themselves unless given)
    bandwidth_gbps: tuple[tuple[float, ...], ...]
    tokens_per_s: tuple[float, ...]

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
        return "\n".join([*lines, self._sentence(choice)])

    def to_json(self) -> dict[str, Any]:
        """For --json: the chosen site, its index, and the demand of every site by name."""
        choice = self.choice()
        return {
            "site": self.names[choice.index],
            "index": choice.index,
            "demand": dict(zip(self.names, choice.demand, strict=True)),
        }

    def _sentence(self, choice: SiteChoice) -> str:
        parts = zip(self.clusters, self.bandwidth_gbps[choice.index], self.tokens_per_s, strict=True)
        terms = " + ".join(f"{gbps:g} x {tokens:g} ({name})" for name, gbps, tokens in parts)
        demand = choice.demand[choice.index]
        return f"Place the parameter servers at {self.names[choice.index]}: {terms} = {demand:.6g}"


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
    """Read `[sites]` with names, bandwidth_gbps, tokens_per_s, and clusters where they differ from the sites.

    Raises ConfigError that names the file and the key.
    """
    table = _table(path)
    unknown = sorted(set(table) - set(KEYS))
    if unknown:
        raise ConfigError(f"{path}: [sites] has the unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
    names = _strings(path, table, "names")
    clusters = _strings(path, table, "clusters") if "clusters" in table else names
    rows = _get(path, table, "bandwidth_gbps")
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: [sites] bandwidth_gbps must be a list of rows of numbers")
    bandwidth = tuple(_numbers(path, f"bandwidth_gbps row {i}", row) for i, row in enumerate(rows))
    tokens = _numbers(path, "tokens_per_s", _get(path, table, "tokens_per_s"))
    _check_names(path, names, clusters, len(bandwidth), len(tokens))
    sites = Sites(names, clusters, bandwidth, tokens)
    try:
        sites.choice()
    except ConfigError as error:
        raise ConfigError(f"{path}: [sites] {error}") from error
    return sites


def _table(path: Path) -> Mapping[str, Any]:
    document = read_toml(path)
    table = document.get("sites")
    if not isinstance(table, dict):
        raise ConfigError(f"{path} has no table [sites]: it needs {', '.join(KEYS)} (clusters may be left out)")
    return table


def _get(path: Path, table: Mapping[str, Any], key: str) -> Any:
    if key not in table:
        raise ConfigError(f"{path}: [sites] lacks {key!r}")
    return table[key]


def _strings(path: Path, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = _get(path, table, key)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{path}: [sites] {key} must be a list of names")
    if len(set(values)) != len(values):
        raise ConfigError(f"{path}: [sites] {key} has a name twice")
    return tuple(values)


def _numbers(path: Path, key: str, values: Any) -> tuple[float, ...]:
    numbers = isinstance(values, list) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
    )
    if not numbers:
        raise ConfigError(f"{path}: [sites] {key} must be a list of numbers")
    return tuple(float(value) for value in values)


def _check_names(path: Path, names: tuple[str, ...], clusters: tuple[str, ...], rows: int, columns: int) -> None:
    if len(names) != rows:
        raise ConfigError(f"{path}: [sites] names has {len(names)} sites, bandwidth_gbps has {rows} rows")
    if len(clusters) != columns:
        raise ConfigError(
            f"{path}: [sites] tokens_per_s has {columns} numbers for {len(clusters)} clusters ({', '.join(clusters)})"
        )


def _check_vector(name: str, values: Sequence[float]) -> None:
    if not values:
        raise ConfigError(f"{name} is empty: give one number for each training cluster")
    for j, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} has {value!r} at place {j}; it must be finite and not negative")
