"""python hand_out_keys.py --cluster NAME... --slave NAME... --operator NAME... [--for-others NAME...]

Makes the keys of a run that one machine runs in containers, as far as they are missing, and hands each identity out:
the folder /keys/ca holds the authority and all identities, as `dips keys init /keys/ca` makes them, and the files of
each identity are copied to /keys/NAME, the volume that only its process sees. Started again it makes what is new,
and hands out what was renewed meanwhile. --for-others: identities of programs that run under another user.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dips.core.errors import ConfigError
from dips.local.authority import ensure_keys

KEYS = Path("/keys")


def main(arguments: Sequence[str], keys: Path = KEYS) -> int:
    wanted = _parser().parse_args(arguments)
    try:
        authority = ensure_keys(keys / "ca", wanted.cluster, wanted.slave, wanted.operator)
        for name in authority.names():
            others = name in wanted.for_others
            hand_out(authority.identity(name), keys / name, others)
            print(f"{keys / name}: keys of {authority.certificate(name)}{', for its own user' if others else ''}")
    except ConfigError as error:
        print(f"keys: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def hand_out(identity: Path, place: Path, others: bool) -> None:
    """Copy an identity's files to `place`, each of them replaced whole. others: whoever sees the volume may read it.

    Raises ConfigError when `place` cannot be written.
    """
    try:
        place.chmod(0o755 if others else 0o700)
        for file in sorted(
            identity.iterdir(), key=lambda file: file.suffix != ".key"
        ):  # as they are written: key first
            _replace(place / file.name, file.read_bytes(), 0o644 if others or file.suffix != ".key" else 0o600)
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be written: {error.strerror}; it must be a folder of the image, so that a volume of this "
            "user's is mounted there: name it in the build argument IDENTITIES"
        ) from error


def _replace(file: Path, content: bytes, mode: int) -> None:
    if file.exists() and file.read_bytes() == content:
        return
    temporary = file.with_name(f".{file.name}.new")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as out:
        os.fchmod(handle, mode)
        out.write(content)
        out.flush()
        os.fsync(handle)
    os.replace(temporary, file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Make a run's keys and copy each identity to its own folder of /keys.")
    for option in ("--cluster", "--slave", "--operator", "--for-others"):
        parser.add_argument(option, action="append", default=[], metavar="NAME")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
