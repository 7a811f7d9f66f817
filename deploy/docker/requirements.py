"""python requirements.py EXTRA...: what the package and these of its extras need, one requirement a line.

For layers of an image that change only when pyproject.toml does, not with every line of the sources. The extras may
name one another, as `dips-training[slave]` does. Must never need anything but Python itself.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_OURS = re.compile(r"dips-training\[([\w,\s-]+)\]\Z")


def requirements(project: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """The requirements of `project` (the table [project]) with `extras`, each once. Raises KeyError for an extra that
    it does not have."""
    found = dict.fromkeys(project["dependencies"])
    for extra in extras:
        found.update(dict.fromkeys(_of_extra(project["optional-dependencies"], extra)))
    return list(found)


def _of_extra(table: Mapping[str, Sequence[str]], extra: str) -> Iterable[str]:
    for line in table[extra]:
        ours = _OURS.match(line)
        if ours is None:
            yield line
            continue
        for name in ours[1].split(","):
            yield from _of_extra(table, name.strip())


if __name__ == "__main__":
    with Path("pyproject.toml").open("rb") as file:
        print("\n".join(requirements(tomllib.load(file)["project"], sys.argv[1:])))
