"""`dips keys`: makes, shows, renews and revokes the keys of a run's processes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dips.core.errors import ConfigError
from dips.core.net.security import Role
from dips.local.authority import MASTER, Authority

app = typer.Typer(no_args_is_help=False)

Folder = Annotated[Path, typer.Argument(metavar="KEYS", help="The folder with the authority and all identities.")]
Clusters = Annotated[list[str] | None, typer.Option("--cluster", metavar="NAME", help="A cluster; again for more.")]
Slaves = Annotated[list[str] | None, typer.Option("--slave", metavar="NAME", help="A slave; again for more.")]
Operators = Annotated[list[str] | None, typer.Option("--operator", metavar="NAME", help="A person who operates it.")]


@app.command()
def init(folder: Folder, cluster: Clusters = None, slave: Slaves = None, operator: Operators = None) -> int:
    """Make a certificate authority, the master's keys, and those of every process that is named.

    Each process gets its own directory of the folder, and nothing else. The folder's `ca` signs: keep it where no one
    else reads it.
    """
    with Authority.create(folder).locked() as authority:
        authority.add(Role.MASTER, MASTER)
        _add(authority, cluster, slave, operator)
        for name in authority.names():
            print(f"{authority.identity(name)}: keys of {authority.certificate(name)}")
    print(f"{folder / 'ca'}: the authority; whoever can read ca.key can make keys for anyone")
    return 0


@app.command()
def add(folder: Folder, cluster: Clusters = None, slave: Slaves = None, operator: Operators = None) -> int:
    """Make keys for more processes; a run that goes on accepts them at once."""
    if not (cluster or slave or operator):
        raise ConfigError("no process is named: give --cluster NAME, --slave NAME or --operator NAME")
    with Authority(folder).locked() as authority:
        for place in _add(authority, cluster, slave, operator):
            print(f"{place}: keys of {authority.certificate(place.name)}")
    return 0


@app.command()
def revoke(
    folder: Folder,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Whose keys to revoke.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; its holder and the log get it.")] = "",
) -> int:
    """Revoke all keys that were ever made for a name: the master refuses them within a second.

    Processes on this machine that use this folder's keys read the list by themselves. To others copy revoked.json, next
    to their keys: the master needs it (there also as its --revoked FILE), and who serves metrics beyond loopback.
    """
    with Authority(folder).locked() as authority:
        for name in names:
            fresh = authority.revoke(name, reason)
            serials = ", ".join(row.serial for row in fresh)
            print(f"{name}: revoked {serials}" if fresh else f"{name}: was revoked already")
        print(f"the list: {folder / 'ca' / 'revoked.json'}; copied to every folder of keys in {folder}")
    return 0


@app.command()
def renew(
    folder: Folder,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Whose certificates.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Renew all in the folder.")] = False,
    new_key: Annotated[bool, typer.Option("--new-key", help="Make a new key too, not only a certificate.")] = False,
    new_ca: Annotated[
        bool, typer.Option("--new-ca", help="First make a new authority; the old one stays trusted as well.")
    ] = False,
    retire_old_ca: Annotated[
        bool, typer.Option("--retire-old-ca", help="Trust only the newest authority from now on.")
    ] = False,
) -> int:
    """Make new certificates for processes that have keys; those that run load them by themselves.

    Another authority, while a run goes on: renew --new-ca and bring every process its new ca.crt; renew --all and bring
    them their new files; renew --retire-old-ca and bring them ca.crt once more.
    """
    if not (names or everyone or new_ca or retire_old_ca):
        raise ConfigError("no one is named: give names, or --all for everyone")
    with Authority(folder).locked() as authority:
        if new_ca:
            authority.new_authority()
            print("a new authority signs from now on; the old one is trusted until --retire-old-ca")
        for name in authority.names() if everyone else names or []:
            place, renewed = authority.renew(name, new_key), authority.certificate(name)
            print(f"{place}: keys of {renewed}, until {_day(renewed.not_after)}")
        if retire_old_ca:
            print(f"{authority.retire_old()} old authorities are no longer trusted")
    return 0


@app.command()
def show(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False
) -> int:
    """List who has keys, until when, and whose were revoked."""
    authority = Authority(folder)
    revoked = {row["serial"]: row["reason"] for row in authority.revoked()}
    rows = [authority.certificate(name) for name in authority.names()]
    identities = [
        {
            "name": row.name,
            "role": row.role.value,
            "serial": row.serial_hex,
            "not_after": row.not_after.isoformat(),
            "revoked": row.serial_hex in revoked,
            "reason": revoked.get(row.serial_hex, ""),
            "lapse": row.lapse(datetime.now(UTC)),
        }
        for row in rows
    ]
    if as_json:
        print(json.dumps({"identities": identities, "authorities": len(authority.authorities())}))
        return 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "role", "serial", "until", ""):
        table.add_column(column, no_wrap=True)
    for row, item in zip(rows, identities, strict=True):
        state = f"revoked: {item['reason'] or 'no reason given'}" if item["revoked"] else str(item["lapse"])
        table.add_row(row.name, row.role.value, row.serial_hex[:12], _day(row.not_after), state)
    Console().print(table)
    return 0


def _add(
    authority: Authority, cluster: list[str] | None, slave: list[str] | None, operator: list[str] | None
) -> list[Path]:
    wanted = [(Role.CLUSTER, name) for name in cluster or ()]
    wanted += [(Role.SLAVE, name) for name in slave or ()]
    wanted += [(Role.OPERATOR, name) for name in operator or ()]
    return [authority.add(role, name) for role, name in wanted]


def _day(when: datetime) -> str:
    return when.strftime("%Y-%m-%d")
