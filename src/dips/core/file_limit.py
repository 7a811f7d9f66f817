"""Raises the limit of files and sockets that this process may have open, as far as the system allows, up to a bound."""

from __future__ import annotations

import resource

WANTED_FILES = 65_536
"""Connections of ten thousand unknown peers and as many again; each costs the kernel some KB."""


def raise_file_limit(wanted: int = WANTED_FILES) -> int:
    """Raise the soft limit (often 1024) towards `wanted`, as far as the hard one goes. Returns the limit from now on.

    To be called at a process's start; a system that refuses leaves things as they were.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if possible <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    except (OSError, ValueError):  # some systems refuse what they state as their hard limit
        return soft
    return possible
