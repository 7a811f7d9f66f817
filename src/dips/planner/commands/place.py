"""`dips place`: chooses the site at which the parameter servers should run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dips.core.server_site import from_toml


def place(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file with the table [sites].")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Choose the site for the master and slaves: the one with the best links to the clusters that need
    them most.

    The file says, in a table [sites], names = [...], bandwidth_gbps = [[...]] (a row for each site, a
    column for each cluster) and tokens_per_s = [...] (each cluster's speed); clusters = [...] names the
    clusters, if they are not the sites themselves.
    """
    sites = from_toml(file)
    print(json.dumps(sites.to_json()) if as_json else sites.explain())
    return 0
