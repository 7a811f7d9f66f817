"""The name under which this software is published, and its version.

`pip install dips` brings an astronomy package: that name belongs to another project, and the index takes `di-ps` for
the same. So the distribution is called `dips-training`; the import name and the command are `dips`. pyproject.toml
takes the version from here, so that it is known without reading the records of installed packages.
"""

from __future__ import annotations

import platform

DISTRIBUTION = "dips-training"

VERSION = "0.1.0"


def requirement(*extras: str) -> str:
    """The requirement for pip: the distribution, with these extras."""
    return f"{DISTRIBUTION}[{','.join(extras)}]" if extras else DISTRIBUTION


def how_to_install(*extras: str) -> str:
    """The command that adds what these extras need, for the remedy of an error. It is that of a checkout until the
    index has the distribution."""
    place = f"'.[{','.join(extras)}]'" if extras else "."
    return f"pip install {place} in the checkout of Di-PS"


_COMPUTED_WITH = ("torch", "numpy", "numba", "grpcio", "protobuf", "pyzmq", "safetensors")


def software_versions() -> dict[str, str]:
    """The versions that a report's numbers may depend on: Python's, this one's, and the packages' that are
    installed."""
    import importlib.metadata  # slow to import, and seldom needed

    versions = {"python": platform.python_version(), "dips": VERSION}
    for name in _COMPUTED_WITH:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
