"""What people write: settings files, values with units, addresses, failpoints, identities."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from support.repository import ROOT

from dips.core import units
from dips.core.config import Knobs, load
from dips.core.errors import ConfigError
from dips.core.net.addresses import parse_address
from dips.core.net.keys import load_identity
from dips.core.observe.failpoints import parse
from dips.core.server_site import from_toml
from dips.lab.sim.scale.scenario import load_scenario
from dips.local.authority import ensure_keys
from dips.local.run_file import read_run_file
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig
from dips.worker.config import ClientConfig
from fuzz.disk import fresh, numbered, one_of_files, scratch
from fuzz.mutate import TEXTS, mutated
from fuzz.target import Target

ROLES: dict[str, type[Knobs]] = {"master": MasterConfig, "slave": SlaveConfig, "worker": ClientConfig}

_SITES = b'[sites]\nnames = ["a", "b"]\nbandwidth_gbps = [[1, 2], [3, 4.5]]\ntokens_per_s = [10, 20]\n'

_VALUES = st.one_of(
    st.sampled_from(("1", "-1", "1e400", "nan", "true", '""', '"1 GiB"', '"auto"', "[]", "{}", "0x10", "2026-01-01")),
    st.text(max_size=30),
    st.integers(),
    st.floats(),
)


@lru_cache(maxsize=1)
def examples() -> list[bytes]:
    """The settings files that we ship."""
    shipped = sorted([*(ROOT / "examples").glob("*.toml"), *(ROOT / "src").rglob("*.toml")])
    return [path.read_bytes() for path in shipped]


def settings() -> Target:
    """A file with one table for each role: names of real settings with any value, or changed examples."""
    names = sorted({(section, name) for section, kind in ROLES.items() for name in kind.model_fields})

    def line(setting: tuple[tuple[str, str], object]) -> str:
        return f"[{setting[0][0]}]\n{setting[0][1]} = {setting[1]}\n"

    one = st.tuples(st.sampled_from(names), _VALUES).map(line).map(lambda text: text.encode("utf-8", "replace"))

    def feed(data: bytes) -> str:
        path = fresh("settings") / "run.toml"
        path.write_bytes(data)
        for section, kind in ROLES.items():
            load(kind, section, file=path, environment={}, overrides=_given(section))
        return "taken"

    return Target("settings", st.one_of(one, one, mutated(examples)), feed, (ConfigError,))


def _given(section: str) -> dict[str, object]:
    if section == "master":
        return {"run_id": "run", "directory": scratch() / "m", "insecure": True}
    if section == "slave":
        return {"run_id": "run", "slave_id": "s0", "directory": scratch() / "s", "insecure": True}
    return {"cluster_id": "a", "insecure": True}


def one_of_readers(
    name: str, inputs: st.SearchStrategy[bytes], made: Callable[[bytes], Any], *readers: Callable[[Any], object]
) -> Target:
    """The first byte says who reads what is made of the rest."""

    def feed(data: bytes) -> str:
        reader = readers[data[0] % len(readers)] if data else readers[0]
        reader(made(data[1:]))
        return f"taken by {reader.__name__}"

    return Target(name, numbered([inputs] * len(readers)), feed, (ConfigError,))


def files() -> Target:
    """The whole files that commands take, each by its own reader."""

    def file(content: bytes) -> Path:
        path = fresh("files") / "file.toml"
        path.write_bytes(content)
        return path

    deeper_than_pythons_stack = [b"a = " + b"[" * 9_000, b"a = " + b"{b=" * 9_000, b"[" + b"a." * 3_000 + b"b]"]
    seeds = st.one_of(mutated(examples), mutated(lambda: [_SITES]), mutated(lambda: deeper_than_pythons_stack))
    return one_of_readers("settings files", seeds, file, read_run_file, from_toml, load_scenario)


def values() -> Target:
    """Numbers with units, addresses and failpoints, as words of a command line."""
    near = ("64 MB", "1 h 30 min", "2e9", "1.5M", "10 Gbit/s", "127.0.0.1:80", "[::1]:80")
    points = ("master.journal.before_commit=6*off->crash", "slave.link.before_send=10%drop; a=sleep(0.5)")
    words = st.one_of(
        st.text(max_size=40).map(str.encode),
        mutated(lambda: [word.encode() for word in near + points]),
        st.sampled_from([word.encode("utf-8", "surrogatepass") for word in TEXTS]),
        st.from_regex(r"-?[0-9]{0,400}(\.[0-9]{0,40})?(e[0-9]{1,6})? ?[a-zA-Z/%]{0,8}", fullmatch=True).map(str.encode),
    )
    of_units = (units.parse_bytes, units.parse_seconds, units.parse_count, units.parse_bits_per_s)
    readers = (*of_units, parse_address, parse)
    return one_of_readers("values", words, lambda data: data.decode("utf-8", "replace"), *readers)


@lru_cache(maxsize=1)
def identity_files() -> dict[str, bytes]:
    ensure_keys(fresh("keys"), ["a"], ["s0"])
    folder = scratch() / "keys" / "a"
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    return found | {
        "revoked.json": b'{"revoked": [{"serial": "1f", "name": "b", "role": "cluster", "reason": "lost"}]}'
    }


def identity() -> Target:
    def feed(folder: Path) -> str:
        load_identity(folder)
        return "taken"

    return one_of_files("identity", identity_files, feed, ConfigError)


TARGETS: tuple[Callable[[], Target], ...] = (settings, files, values, identity)
