"""Checks versions: what is installed here against what dips and its extras ask for, from the packages' records."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterable

from dips.core.release import DISTRIBUTION, how_to_install, requirement
from dips.doctor.findings import Finding, Findings, fail, ok

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?P<specs>[^;]*?)\s*(?:;(?P<marker>.*))?\Z")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([A-Za-z0-9_-]+)['"]""")
_SPEC = re.compile(r"\s*(>=|<=|==|!=|<|>|~=)\s*([0-9][0-9A-Za-z.+]*)\s*\Z")

VersionOf = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """The version of a package; None when it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(
    extras: Iterable[str], requirements: Iterable[str] | None = None, version: VersionOf = installed
) -> Findings:
    """Check the packages that dips and these extras need. requirements: as in dips' own record, for tests."""
    if requirements is None:
        try:
            requirements = importlib.metadata.requires(DISTRIBUTION) or ()
        except importlib.metadata.PackageNotFoundError:
            sentence = f"{DISTRIBUTION} itself is not installed in this environment"
            yield fail("packages", sentence, f"{how_to_install()}, or `pip install -e .` in a checkout of the sources")
            return
    if (other := version("dips")) is not None:
        sentence = f"a distribution named dips ({other}) is installed as well, in the same folder as {DISTRIBUTION}"
        yield fail(
            "packages", sentence, f"pip uninstall dips, then install {DISTRIBUTION} again (pip's --force-reinstall)"
        )
    wanted = {"", *extras}
    bad: list[Finding] = []
    good: list[str] = []
    for text in requirements:
        match = _REQUIREMENT.match(text)
        extra = _extra_of(text)
        if match is None or extra not in wanted or match["name"].lower() == DISTRIBUTION:
            continue
        found = _check(match["name"], match["specs"], extra, version(match["name"]))
        if found is None:
            good.append(f"{match['name']} {version(match['name'])}")
        else:
            bad.append(found)
    yield from dict.fromkeys(bad)
    yield ok("packages", f"python {platform.python_version()}, {', '.join(dict.fromkeys(good))}")


def satisfies(version: str, specs: str) -> bool:
    """Whether a version is within ">=1.2,<2". Of a version only its leading numbers count."""
    return all(_holds(_numbers(version), spec) for spec in specs.split(",") if spec.strip())


def _check(name: str, specs: str, extra: str, found: str | None) -> Finding | None:
    extras = (extra,) if extra else ()
    what, remedy = requirement(*extras), how_to_install(*extras)
    if found is None:
        return fail("packages", f"{name} is not installed, and {what} needs it", remedy)
    if not satisfies(found, specs):
        return fail("packages", f"{name} {found} is installed, and {what} needs {specs}", remedy)
    return None


def _extra_of(text: str) -> str:
    match = _EXTRA.search(text)
    return match[1] if match else ""


def _holds(have: tuple[int, ...], spec: str) -> bool:
    match = _SPEC.match(spec)
    if match is None:
        return True  # a form that dips' own requirements do not use
    want = _numbers(match[2])
    length = max(len(have), len(want))
    mine, theirs = (numbers + (0,) * (length - len(numbers)) for numbers in (have, want))
    match match[1]:
        case ">=":
            return mine >= theirs
        case "<=":
            return mine <= theirs
        case "<":
            return mine < theirs
        case ">":
            return mine > theirs
        case "==":
            return mine == theirs
        case "!=":
            return mine != theirs
        case _:
            return mine >= theirs and mine[: len(want) - 1] == theirs[: len(want) - 1]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
