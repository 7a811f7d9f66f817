"""What `dips doctor` says of given facts: each limit, each remedy, and never a stack trace."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.repository import ROOT

from dips.cli import doctor as command_doctor
from dips.cli import main
from dips.core.errors import ConfigError
from dips.core.messages import SlaveStatus, StatusReply
from dips.core.net.keys import load_identity
from dips.core.net.security import INSECURE, Role
from dips.doctor import host, joining, local, network
from dips.doctor.findings import Check, Finding, Grade, examined, fail, ok, warn
from dips.doctor.network import ListenAddress, check_addresses, check_identities
from dips.local.authority import WantedIdentity, ensure_keys
from dips.local.run_directory import UP, Mark, claim
from dips.local.run_file import read_run_file

FACTS = host.HostFacts(32 << 30, 65_536, "madvise", 64 << 20, 64 << 20, True, 64)
OK, WARN, FAIL = Grade.OK, Grade.WARN, Grade.FAIL


def facts(**changes: Any) -> host.HostFacts:
    return dataclasses.replace(FACTS, **changes)


def by_check(findings: Iterable[Finding]) -> dict[str, Grade]:
    """The worst grade of each check."""
    worst: dict[str, Grade] = {}
    for one in findings:
        known = worst.get(one.check, OK)
        worst[one.check] = max(known, one.grade, key=list(Grade).index)
    return worst


# ---- findings ----


def test_a_finding_has_a_remedy_unless_all_is_well() -> None:
    found = [ok("a", "fine"), warn("b", "so", "do"), fail("a", "bad\x1b[2J", "do this")]
    assert [str(one) for one in found] == ["OK    a: fine", "WARN  b: so: do", "FAIL  a: bad\\x1b[2J: do this"]
    assert found[1].to_json() == {"check": "b", "grade": "WARN", "sentence": "so", "remedy": "do"}
    assert command_doctor.summary(found[:2]) == "1 OK, 1 WARN, 0 FAIL: nothing prevents the run"


def test_a_check_that_cannot_be_made_is_a_finding_and_hides_no_other() -> None:
    def wrong() -> Iterator[Finding]:
        yield ok("first", "seen")
        raise ConfigError("the file is wrong: correct it")

    def denied() -> Iterator[Finding]:
        raise PermissionError(13, "Permission denied", "/secret")
        yield

    found = list(examined([Check("a", wrong), Check("b", denied), Check("c", lambda: [ok("c", "x")])]))
    assert [(one.check, one.grade) for one in found] == [("first", OK), ("a", FAIL), ("b", FAIL), ("c", OK)]
    assert "/secret: Permission denied" in found[2].sentence


# ---- the machine ----


@pytest.mark.parametrize(
    ("finding", "grade"),
    [
        (host.judge_memory(FACTS, 8 << 30, "it"), OK),
        (host.judge_memory(FACTS, 30 << 30, "it"), WARN),
        (host.judge_memory(FACTS, 33 << 30, "it"), FAIL),
        (host.judge_memory(facts(memory_bytes=None), 1, "it"), WARN),
        (host.judge_files(FACTS), OK),
        (host.judge_files(facts(files=20_000)), WARN),
        (host.judge_files(facts(files=1024)), FAIL),
        (host.judge_huge_pages(facts(huge_pages="never")), WARN),
        (host.judge_huge_pages(facts(huge_pages=None)), OK),
        (host.judge_buffers(FACTS, 10e9, 0.02), OK),
        (host.judge_buffers(FACTS, 10e9, 0.05), WARN),
        (host.judge_buffers(facts(receive_buffer_bytes=None, send_buffer_bytes=None), 1e12, 1.0), OK),
        (host.judge_clock(facts(clock_is_kept=False)), WARN),
        (host.judge_clock(facts(clock_is_kept=None)), OK),
        (host.judge_processors(facts(processors=2), 3), WARN),
    ],
)
def test_the_machine_is_judged_by_its_facts(finding: Finding, grade: Grade) -> None:
    assert finding.grade is grade
    assert bool(finding.remedy) is (grade is not OK)


# ---- disks ----


def test_room_is_counted_for_what_is_not_there_yet(tmp_path: Path) -> None:
    rooms = [host.Room(tmp_path / "s0", 100, "s0"), host.Room(tmp_path / "s1", 50, "s1")]
    assert host.judge_room(rooms, 0, 1000).grade is OK
    assert host.judge_room(rooms, 0, 160).grade is WARN
    assert host.judge_room(rooms, 0, 149).grade is FAIL
    assert host.judge_room(rooms, 100, 149).grade is OK
    (tmp_path / "s0").mkdir()
    (tmp_path / "s0" / "ring-0").write_bytes(bytes(70))
    assert host.taken(tmp_path) == 70
    (finding,) = host.check_room([host.Room(tmp_path / "not" / "there", 1 << 60, "ring")])
    assert finding.grade is FAIL
    assert f"below {tmp_path}" in finding.sentence


@pytest.mark.parametrize(
    ("speed", "durable", "graded"),
    [
        (host.DiskSpeed(0.002, 0.01, 1e9, 0.0), True, {"flush": OK, "snapshots": OK}),
        (host.DiskSpeed(0.05, 0.5, 1e9, 0.0), True, {"flush": WARN, "snapshots": OK}),
        (host.DiskSpeed(0.002, 0.01, 3e8, 0.0), True, {"flush": OK, "snapshots": WARN}),
        (host.DiskSpeed(0.002, 0.01, 1e7, 0.0), True, {"flush": OK, "snapshots": FAIL}),
        (host.DiskSpeed(0.002, 0.01, 1e7, 0.0), False, {"flush": OK}),
        (host.DiskSpeed(0.002, 0.01, 1e9, -90.0), True, {"flush": OK, "snapshots": OK, "clock": WARN}),
    ],
)
def test_a_disk_is_judged_by_its_speed(speed: host.DiskSpeed, durable: bool, graded: dict[str, Grade]) -> None:
    assert by_check(host.judge_speed(Path("/x"), speed, 10**10, 30.0, durable)) == graded


def test_a_disk_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    speed = host.measured(tmp_path / "run", flushes=3, write_bytes=1 << 20)
    assert 0 < speed.flush_s <= speed.longest_flush_s
    assert speed.bytes_per_s > 0
    assert abs(speed.clock_ahead_s) < 60
    assert list(tmp_path.iterdir()) == []
    facts_here = host.read_facts()
    assert min(facts_here.files, facts_here.processors) > 0


def test_a_directory_must_be_one_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert host.check_writable(tmp_path / "a" / "b").grade is OK
    assert host.check_writable(tmp_path / "file" / "run").grade is FAIL
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        assert host.check_writable(tmp_path / "a").grade is FAIL


# ---- packages ----


@pytest.mark.parametrize(
    ("version", "specs", "holds"),
    [
        ("6.33.6", ">=6.33.5,<6.34", True), ("6.34", ">=6.33.5,<6.34", False), ("2.13.0+cpu", ">=2.6", True),
        ("2.9.0.dev1", ">=2.6", True), ("1.0", "", True),
    ],
)  # fmt: skip
def test_an_installed_version_is_within_its_bounds_or_not(version: str, specs: str, holds: bool) -> None:
    found, *_ = host.check_packages([], [f"numpy{specs}"], {"numpy": version}.get)
    assert (found.grade is OK) is holds


WANTED = ["numpy>=2", "torch>=2.6; extra == 'worker'", 'kubernetes>=31; extra == "deploy"', "dips-training[x]"]


@pytest.mark.parametrize(
    ("extras", "have", "grades", "said"),
    [
        (["worker"], {"torch": "2.5"}, [FAIL, OK], "torch 2.5 is installed, and dips-training[worker] needs >=2.6"),
        (["worker"], {}, [FAIL, OK], "pip install '.[worker]'"),
        ([], {"torch": "2.5"}, [OK], ""),
        ([], {"dips": "0.2.0"}, [FAIL, OK], "pip uninstall dips, then install dips-training again"),
    ],
)
def test_packages_must_be_there(extras: list[str], have: dict[str, str], grades: list[Grade], said: str) -> None:
    found = list(host.check_packages(extras, WANTED, {"numpy": "2.1", "kubernetes": "1", **have}.get))
    assert [one.grade for one in found] == grades
    assert said in str(found[0])


def test_what_is_installed_here_is_good() -> None:
    (found,) = host.check_packages(["slave"])
    assert found.grade is OK
    assert "numba" in found.sentence


# ---- keys ----


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    ensure_keys(folder, ["a"], ["s0"], ["me"])
    return folder


def test_each_kind_of_wrong_key_is_told_with_its_remedy(keys: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    ensure_keys(other, ["b"], [], [])
    (keys / "me" / "tls.key").chmod(0o644)
    (keys / "s0" / "tls.key").chmod(0o640)
    wanted = [
        WantedIdentity(keys / "nobody", Role.SLAVE, "nobody"),
        WantedIdentity(keys / "me", Role.OPERATOR, "me"),
        WantedIdentity(keys / "s0", Role.SLAVE, "s0"),
        WantedIdentity(keys / "a", Role.SLAVE, "a"),
        WantedIdentity(other / "b", Role.CLUSTER, "b"),
    ]
    found = list(check_identities(wanted))
    told = [(one.grade, one.sentence, one.remedy) for one in found]
    assert [grade for grade, _, _ in told] == [FAIL, FAIL, WARN, FAIL, OK, FAIL]
    assert "cannot be read" in told[0][1]
    assert told[1][2].startswith("chmod 600 ")
    assert told[2][2].startswith("chmod 600 ")
    assert "holds the keys of cluster a, not of slave a" in told[3][1]
    assert "trust different authorities" in told[5][1]


def test_a_certificate_that_has_lapsed_or_soon_will_is_told(keys: Path) -> None:
    wanted = [WantedIdentity(keys / "s0", Role.SLAVE, "s0"), WantedIdentity(keys / "a", Role.CLUSTER, "a")]
    (good,) = check_identities(wanted)
    assert (good.grade, good.sentence) == (OK, "those of s0, a are good")
    del wanted[0]
    (soon,) = check_identities(wanted, datetime.now(UTC) + timedelta(days=380))
    assert (soon.grade, soon.check) == (WARN, "keys")
    assert "dips keys renew" in soon.remedy
    (late,) = check_identities(wanted, datetime.now(UTC) + timedelta(days=400))
    assert late.grade is FAIL
    assert "expired" in late.sentence


# ---- a file of `dips up` ----

RUN = """
[run]
id = "mine"
directory = "{directory}"
insecure = true
slaves = 2
[train]
data = ["{data}"]
[[clusters]]
id = "a"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    (tmp_path / "more.txt").write_text("other text\n" * 100)
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(directory=tmp_path / "run", data=tmp_path))
    return file


def doctored(file: Path, wish: local.DoctorOptions | None = None, **changes: Any) -> dict[str, Grade]:
    wish = wish or local.DoctorOptions()
    return by_check(examined(local.LocalDoctor(read_run_file(file), wish, facts(**changes)).checks()))


def test_a_run_that_other_users_can_open_is_named(run_file: Path, tmp_path: Path) -> None:
    with claim(tmp_path / "run", Mark("doctored", UP, "dips up")):
        pass
    assert doctored(run_file)["permissions"] is OK
    (tmp_path / "run").chmod(0o755)
    assert doctored(run_file)["permissions"] is WARN


def test_a_good_file_on_a_good_machine_has_nothing_against_it(run_file: Path, tmp_path: Path) -> None:
    found = doctored(run_file)
    assert found.pop("keys") is WARN, "insecure is worth a word"
    found.pop("flush"), found.pop("snapshots"), found.pop("disk")  # this machine's
    assert set(found.values()) == {OK}
    assert set(found) >= {"directory", "packages", "data", "model", "memory", "files", "huge pages", "clock"}
    assert "kernel buffers" not in found
    for link, grade in ((1e9, OK), (1e12, WARN)):
        assert doctored(run_file, local.DoctorOptions(link_bits_per_s=link))["kernel buffers"] is grade
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "check", "said"),
    [
        ('[slave]\nmemory_bytes = "1 MiB"', "model", "the model would be refused"),
        (
            '[master]\nlisten = "127.0.0.1:29777"\n[slave]\ndata_port = 29777',
            "ports",
            "both to listen at 127.0.0.1:29777",
        ),
        ('[[clusters]]\nid = "x"\ncommand = ["no-such-program"]', "clusters", "there is no program 'no-such-program'"),
        ('[[clusters]]\nid = "x"\ndata = ["/nowhere"]', "data", "/nowhere"),
    ],
)
def test_what_is_wrong_is_found(
    run_file: Path,
    more: str,
    check: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(network, "check_free", lambda door: ok("ports", door.address))
    run_file.write_text(f"{run_file.read_text()}{more}\n")
    assert main.run(["doctor", str(run_file)]) == 1
    told = capsys.readouterr()
    failed = [line for line in told.out.splitlines() if line.startswith("FAIL")]
    assert failed
    assert all(line.startswith(f"FAIL  {check}: ") and said in line for line in failed)
    assert told.out.splitlines()[-1].endswith(f"{len(failed)} FAIL: it would fail: correct what is FAIL")
    assert told.err == ""


def test_memory_is_judged_for_the_model_that_is_said(run_file: Path) -> None:
    text = run_file.read_text().replace("[[clusters]]", '[[clusters]]\ncommand = ["true"]')
    run_file.write_text(text.replace(f'[train]\ndata = ["{run_file.parent}"]', ""))
    assert doctored(run_file)["model"] is WARN
    assert "memory" not in doctored(run_file)
    found = doctored(run_file, local.DoctorOptions(params=10**11))
    assert (found["model"], found["memory"], found["disk"]) == (FAIL, FAIL, FAIL)
    assert doctored(run_file, local.DoctorOptions(params=10**6), memory_bytes=1 << 20)["memory"] is FAIL


@pytest.mark.parametrize("files", ["none", "stagings", "versions"])
def test_the_memory_that_the_doctor_asks_for_is_enough(run_file: Path, files: str) -> None:
    text, options = f'{run_file.read_text()}[master]\nmemory_files = "{files}"\n', local.DoctorOptions(params=10**8)
    run_file.write_text(f'{text}[slave]\nmemory_bytes = "1 MiB"\n')
    findings = examined(local.LocalDoctor(read_run_file(run_file), options, facts()).checks())
    [remedy] = {found.remedy for found in findings if found.check == "model" and found.grade is FAIL}
    [needed] = re.findall(r"set memory_bytes = (\d+)", remedy)
    run_file.write_text(f"{text}[slave]\nmemory_bytes = {needed}\n")
    assert doctored(run_file, options)["model"] is OK


def test_a_directory_of_somebody_else_is_found(run_file: Path, tmp_path: Path) -> None:
    with claim(tmp_path / "run", Mark("mine", UP, "dips up")):
        assert doctored(run_file)["directory"] is WARN, "it runs now"
    assert doctored(run_file)["directory"] is OK
    mark = tmp_path / "run" / "run.json"
    mark.write_text(mark.read_text().replace("mine", "yours"))
    assert doctored(run_file)["directory"] is FAIL
    mark.unlink()
    (tmp_path / "run" / "thesis.txt").write_text("x")
    assert doctored(run_file)["directory"] is FAIL


def test_keys_that_are_there_are_looked_at(run_file: Path, tmp_path: Path) -> None:
    run_file.write_text(run_file.read_text().replace("insecure = true\n", ""))
    assert doctored(run_file)["keys"] is OK
    with claim(tmp_path / "run", Mark("mine", UP, "dips up")) as directory:
        ensure_keys(directory.keys, ["a"], ["s0"], ["operator"])
    assert doctored(run_file)["keys"] is OK
    (tmp_path / "run" / "keys" / "s0" / "tls.key").chmod(0o604)
    assert doctored(run_file)["keys"] is FAIL


# ---- the command ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither a file of `dips up`"),
        ("[run", "is not TOML"),
        ("[run]\nid = 'x'\ndirectory = 'd'\nslavs = 2\n", "did you mean 'slaves'"),
        ("[deploy]\nrun = 'x'\n", "[deploy]"),
    ],
)
def test_a_mistake_in_the_file_is_told(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert main.run(["doctor", str(file), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], told["master"]) == (str(file), "")
    (found,) = told["findings"]
    assert (found["check"], found["grade"]) == ("settings", "FAIL")
    assert said in found["sentence"]


AT_MASTER = ["--master", "127.0.0.1:1", "--insecure"]
AT_SITES = [str(ROOT / "examples" / "three-sites.toml")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["FILE", "--params", "many"], "many"),
        (["FILE", "--link", "0"], "link"),
        (["FILE", "--round-trip", "-1s"], "round-trip"),
        (["FILE", "--link", "10GBps"], "10GBps"),
        (["FILE", "--master", "127.0.0.1:1"], "--master"),
        (["FILE", "--keys", "keys-b"], "--keys"),
        ([], "give a FILE.toml to look at a run, or --master HOST:PORT"),
        (["--master", "nowhere", "--insecure"], "write HOST:PORT"),
        (["--master", "127.0.0.1:1", "--keys", "/none"], "ca.crt cannot be read"),
        *(([*at, "--params", "7B"], "--params does nothing here") for at in (AT_MASTER, AT_SITES)),
        *(([*at, "--round-trip", "20ms"], "--round-trip does nothing here") for at in (AT_MASTER, AT_SITES)),
    ],
)
def test_options_that_cannot_be(
    run_file: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["doctor", *(str(run_file) if word == "FILE" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dips: ")
    assert said in error


def test_a_master_that_does_not_answer_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", *AT_MASTER]) == 1
    said = capsys.readouterr().out
    assert "FAIL  reach: the master at 127.0.0.1:1: nothing listens there" in said
    assert "FAIL  slaves: the master at 127.0.0.1:1 does not answer" in said


@pytest.mark.parametrize(
    ("master", "link_bits_per_s", "graded"),
    [
        ("10.1.2.3:29400", None, WARN),  # 10 Gbit/s with 100 ms
        ("10.1.2.3:29400", 1e9, OK),
        ("127.0.0.1:29400", None, None),  # on this machine there is no link
        ("127.0.0.1:29400", 10e9, WARN),
    ],
)
def test_a_site_s_buffers_are_judged_by_its_link_and_the_longest_measured_round_trip(
    master: str, link_bits_per_s: float | None, graded: Grade | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = [f"tcp://{master.rpartition(':')[0]}:{port}" for port in (29500, 29501)]
    slaves = tuple(SlaveStatus(f"s{n}", None, True, data_endpoint=endpoint) for n, endpoint in enumerate(endpoints))
    status = StatusReply("r", 1, None, 0, 0, "idle", None, 0.0, 0.0, "", slaves=slaves)
    trips_s = dict(zip(endpoints, (0.1, 0.01), strict=True))
    monkeypatch.setattr(joining, "_status", lambda *_: (status, master))
    monkeypatch.setattr(joining, "is_elsewhere", lambda address: "127.0.0.1" not in address)
    monkeypatch.setattr(network, "dialled", lambda endpoint: network.Reached(trips_s[endpoint], True))
    (check,) = (one for one in joining.checks(master, INSECURE, link_bits_per_s, FACTS) if one.name == "slaves")
    found = [one for one in check.look() if one.check == "kernel buffers"]
    assert [one.grade for one in found] == ([] if graded is None else [graded])
    assert all("100 ms" in one.sentence for one in found)
    if graded is WARN:
        assert ("give --link" in found[0].remedy) == (link_bits_per_s is None)


REACHED = {
    "tcp://10.1.2.3:1": network.Reached(0.02, True),
    "tcp://10.1.2.3:2": network.Reached(None, False, "no answer"),
    "tcp://10.1.2.3:3": network.Reached(0.02, False),
    "tcp://10.1.2.4:7": network.Reached(None, False, "no answer within 2 s"),
}
SLAVES = (
    SlaveStatus("s0", None, True, data_endpoint="tcp://10.1.2.3:1"),
    SlaveStatus("s1", None, True, data_endpoint="tcp://10.1.2.3:2"),
    SlaveStatus("s2", None, True, data_endpoint="tcp://10.1.2.3:3"),
    SlaveStatus("s3", None, False, data_endpoint="tcp://10.1.2.3:1"),
    SlaveStatus("s4", None, True, data_endpoint=""),
    SlaveStatus("s5", None, True, data_endpoint="tcp://127.0.0.1:1"),
)


def joined(
    monkeypatch: pytest.MonkeyPatch,
    status: StatusReply,
    let_in: str = "",
    keys: Path | None = None,
    *,
    master: str = "10.1.2.3:9",
    shown: tuple[str, ...] = ("keys", "master", "slaves"),
) -> list[str]:
    """All findings of a look at a master elsewhere but those of the machine, and whether it was asked for anything."""

    class Client:
        address = "10.1.2.3:9"

        def __init__(self, address: str, call_s: float, *, security: object) -> None:
            assert address == master

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def status(self) -> StatusReply:
            return status

    monkeypatch.setattr(joining, "OperatorClient", Client)
    monkeypatch.setattr(joining, "why_not_let_in", lambda master, security: let_in)
    monkeypatch.setattr(joining, "is_elsewhere", lambda address: "127.0.0.1" not in address)
    monkeypatch.setattr(network, "dialled", lambda endpoint: REACHED.get(endpoint, network.Reached(0.01, True)))
    security = INSECURE if keys is None else load_identity(keys)
    found = examined(joining.checks(master, security, None, FACTS))
    return [str(one) for one in found if one.check in shown]


EMPTY = StatusReply("r", 1, None, 0, 0, "idle", None, 0.0, 0.0, "")


def test_what_a_joining_cluster_would_meet_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = joined(monkeypatch, dataclasses.replace(EMPTY, slaves=SLAVES))
    assert told[0].startswith("WARN  keys: the run has no keys")
    assert told[1] == "OK    master: run r accepts these keys: no version yet, 6 slaves"
    slaves = told[2:]
    assert [one.partition(" ")[0] for one in slaves] == ["OK", "FAIL", "FAIL", "WARN", "WARN", "FAIL"]
    assert "slave s0 at tcp://10.1.2.3:1 answers" in slaves[0]
    assert slaves[0].endswith("its keys are tried once a version is published")
    assert "slave s1 at tcp://10.1.2.3:2 cannot be reached from here: no answer" in slaves[1]
    assert "cannot be reached from here: nothing listens there" in slaves[2]
    assert "slave s3 is away" in slaves[3]
    assert "s5" in slaves[5]


@pytest.mark.parametrize(
    ("standby", "grade", "said"),
    [
        (network.Reached(0.01, False, "nothing listens there"), OK, "nothing listens there yet"),
        (network.Reached(None, False, "no answer within 3 s"), WARN, "right while that host is away"),
    ],
)
def test_an_address_where_no_master_answers_is_told_and_no_failure_while_another_one_answers(
    monkeypatch: pytest.MonkeyPatch, standby: network.Reached, grade: Grade, said: str
) -> None:
    monkeypatch.setitem(REACHED, "10.1.2.4:9", standby)
    where: dict[str, Any] = {"master": "10.1.2.4:9,10.1.2.3:9", "shown": ("reach", "master")}
    one, other, master = joined(monkeypatch, EMPTY, **where)
    assert one.startswith(f"{grade.value:<4}  reach: the master at 10.1.2.4:9")
    assert said in one
    assert other.startswith("OK    reach: the master at 10.1.2.3:9 answers")
    assert master.startswith("OK    master: run r accepts these keys, at 10.1.2.3:9")
    monkeypatch.setitem(REACHED, "10.1.2.3:9", network.Reached(None, False, "no answer"))
    assert [one.partition(" ")[0] for one in joined(monkeypatch, EMPTY, **where)][:2] == ["FAIL", "FAIL"]


def test_each_address_of_a_slaves_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    slave = SlaveStatus("s6", None, True, data_endpoint="tcp://slaves.example:7")
    monkeypatch.setattr(joining, "addresses_of", lambda endpoint: ["tcp://10.1.2.4:7", "tcp://10.1.2.5:7"])
    told = joined(monkeypatch, dataclasses.replace(EMPTY, slaves=(slave,)))
    assert [one.partition(" ")[0] for one in told[2:]] == ["OK", "WARN"]
    assert "tcp://10.1.2.4:7 cannot be reached from here: no answer within 2 s" in told[3]
    monkeypatch.setattr(joining, "addresses_of", lambda endpoint: ["tcp://10.1.2.4:7", "tcp://10.1.2.3:3"])
    told = joined(monkeypatch, dataclasses.replace(EMPTY, slaves=(slave,)))
    assert [one.partition(" ")[0] for one in told[2:]] == ["FAIL"]


def test_a_run_that_cannot_be_joined_is_told(monkeypatch: pytest.MonkeyPatch, keys: Path) -> None:
    ended = dataclasses.replace(EMPTY, stopping=True)
    of_cluster = joined(monkeypatch, ended, keys=keys / "a")
    assert [one.split(":")[0] for one in of_cluster] == ["OK    keys", "OK    master", "FAIL  master", "WARN  slaves"]
    assert "run r has ended" in of_cluster[2]
    assert "no slave has attached" in of_cluster[3]
    of_operator = joined(monkeypatch, EMPTY, "another authority", keys / "me")
    assert [one.split(":")[0] for one in of_operator] == ["OK    keys", "WARN  keys", "FAIL  master", "WARN  slaves"]
    assert "may look but not train" in of_operator[1]
    assert of_operator[2] == "FAIL  master: another authority"


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "3", "WORLD_SIZE": "4"}, 3),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, 0),
        ({"RANK": "three", "WORLD_SIZE": "4"}, None),
    ],
)
def test_a_process_of_torchrun_or_srun_knows_its_rank(environment: dict[str, str], rank: int | None) -> None:
    assert command_doctor.rank_here(environment) == rank


def test_each_rank_says_what_it_does_not_reach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [ok("master", "answers"), fail("slaves", "slave s1 cannot be reached", "open the way")]
    monkeypatch.setattr(joining, "checks", lambda *_: [Check("slaves", lambda: found)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main.run(["doctor", "--master", "127.0.0.1:1", "--insecure"]) == 1
        said[rank] = capsys.readouterr().out.splitlines()
    assert said["0"][:2] == [
        "OK    master: rank 0: answers",
        "FAIL  slaves: rank 0: slave s1 cannot be reached: open the way",
    ]
    assert said["0"][2].startswith("1 OK, 0 WARN, 1 FAIL")
    assert said["1"] == ["FAIL  slaves: rank 1: slave s1 cannot be reached: open the way"]


# ---- sockets ----


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_addresses_are_tried_by_listening() -> None:
    with taken_port() as port:
        addresses = [
            ListenAddress("the master", f"127.0.0.1:{port}", "listen"),
            ListenAddress("s0", "127.0.0.1:0", "data_port"),
        ]
        (found,) = check_addresses(addresses)
        assert found.grade is FAIL
        assert network.check_free(ListenAddress("x", f"127.0.0.1:{port}", "listen")).grade is FAIL
    assert network.check_free(ListenAddress("x", f"127.0.0.1:{port}", "listen")).grade is OK
    assert network.check_free(ListenAddress("x", "192.0.2.1:4711", "listen")).grade is FAIL
    assert network.check_free(ListenAddress("x", "no-such-host.invalid:4711", "listen")).check == "addresses"


def test_a_name_that_no_machine_can_have_is_a_finding() -> None:
    address = "node1..example:4711"
    for finding in (
        network.check_free(ListenAddress("x", address, "listen")),
        network.check_name_found("x", address, "advertise"),
        network.judge_reached("x", address, network.dialled(address), must_listen=True),
    ):
        assert finding.grade is FAIL
        assert "node1..example" in finding.sentence


def test_addresses_are_dialled_and_their_round_trip_is_told() -> None:
    with taken_port() as port:
        reached = network.dialled(f"127.0.0.1:{port}")
        assert reached.listens
        assert reached.round_trip_s is not None
        assert network.judge_reached("s0", f"127.0.0.1:{port}", reached, must_listen=True).grade is OK
    refused = network.dialled(f"127.0.0.1:{port}")
    assert (refused.listens, refused.why) == (False, "nothing listens there")
    assert network.judge_reached("s0", "h:1", refused, must_listen=True).grade is FAIL
    assert network.judge_reached("s0", "h:1", refused, must_listen=False).grade is OK
    assert network.check_name_found("s0", "no-such-host.invalid:1", "advertise").grade is FAIL
    assert network.check_name_found("s0", "localhost:1", "advertise").grade is OK
