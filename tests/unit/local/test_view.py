"""What a person and a script see of a status."""

from __future__ import annotations

import dataclasses
import io
import json
import os

import pytest
from rich.console import Console
from support.repository import ROOT
from support.run_status import cluster_status, run_status, slave_status

from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version, check_name
from dips.core.messages import RoundSummary, Settings, StatusReply
from dips.local.view import late_sentence, plain_line, status_json, status_view


def shown(status: StatusReply, width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(status_view(status))
    return console.export_text()


def test_json_has_the_keys_of_the_status_and_ids_as_text() -> None:
    raw = status_json(run_status())
    assert set(raw) == set(StatusReply.__dataclass_fields__)
    assert (raw["published"], raw["round"]) == ("1:12", "r1.13")
    assert raw["clusters"][0]["incarnation"] == "1.3"
    assert raw["settings"]["sync_every_steps"] == 64
    assert json.loads(json.dumps(raw, allow_nan=False)) == raw
    judged = cluster_status(loss=float("nan"), base=None, last_norm=0.5, cosine_rounds=3, direction_alarm=True)
    unknown = status_json(run_status(published=None, clusters=(judged,)))
    keys = ("loss", "base", "last_norm", "last_z", "cosine_rounds", "direction_alarm")
    assert [unknown["clusters"][0][key] for key in keys] == [None, None, 0.5, None, 3, True]
    assert unknown["published"] is None
    ids = (Version(2, 3), RoundId(1, 2), PushId(ClusterId("a"), Incarnation(1, 2), 3), b"\x01\xff")
    assert [status_json(one) for one in ids] == ["2:3", "r1.2", "a/1.2#3", "01ff"]


NAN = float("nan")
JUDGED = cluster_status(last_norm=0.8123, last_z=-1.25, last_cosine=0.456, cosine_usual=0.41, cosine_rounds=12)
BAD = cluster_status("d", last_norm=0.8, cosine_usual=0.01, cosine_rounds=12, direction_alarm=True)
SILENT = cluster_status("a", loss=NAN, pushes_applied=1, steps_per_s=2.0)
LATER = Settings(durability="async")
REVOKED = "Join: the certificate of cluster b was revoked"
STATUSES = {
    "usual": run_status(),
    "nothing yet": run_status(published=None, clusters=(), round=None, phase="IDLE", tk_max_tokens=0),
    "waiting and recovering": run_status(
        recovery="slave s1 lost version 3:7; going back to 3:5", waiting_for="slave s1 is away", paused=True
    ),
    "waiting in its own words": run_status(waiting_for="waiting for slaves: 1 of 2 have attached", stopping=True),
    "lost rounds": run_status(
        rounds_committed=1,
        rounds_merged=0,
        rounds_void=2,
        rounds_aborted=1,
        recent_rounds=(RoundSummary(RoundId(1, 14), "void", "all were rejected", None, (), ("a", "b")),),
        stopped=True,
    ),
    "a restarted master": run_status(published=None, decided=Version(1, 12), round=None, clusters=(), slaves=()),
    "late ranks": run_status(
        clusters=(
            cluster_status(phase="PUSHING", ranks=4, late_ranks=(1, 3)),
            cluster_status("b", ranks=2, late_ranks=(0,)),
            cluster_status("one", ranks=1),
        )
    ),
    "on disk later": run_status(
        settings=LATER,
        durable=None,
        slaves=(slave_status("s0", durable=Version(1, 11)), slave_status("s1", durable=None)),
    ),
    "on disk": run_status(settings=LATER, durable=Version(1, 10)),
    "excluded and quarantined": run_status(
        clusters=(
            cluster_status(quarantined=True),
            cluster_status(
                "c", last_verdict="EXCLUDED", last_reason="norm 31 is 30 times the median", pushes_excluded=2
            ),
        )
    ),
    "judged": run_status(clusters=(JUDGED, cluster_status("b"))),
    "direction alarm": run_status(clusters=(cluster_status(), BAD)),
    "direction alarm of one that is gone": run_status(
        clusters=(cluster_status(), dataclasses.replace(BAD, alive=False, phase="")),
        slaves=(slave_status("s0", alive=False, phase=""),),
    ),
    "no loss": run_status(clusters=(SILENT,)),
    "no loss yet": run_status(clusters=(dataclasses.replace(SILENT, pushes_applied=0),)),
    "a loss of one": run_status(clusters=(SILENT, cluster_status("b", loss=2.5))),
    "refused calls": run_status(refused_calls=12, refused_call=REVOKED),
    "one refused call": run_status(refused_calls=1, refused_call=REVOKED),
}
GOLDEN = ROOT / "tests" / "golden" / "local" / "status.txt"
"""`DIPS_REWRITE_GOLDEN=1 pytest tests/unit/local/test_view.py` writes it again; then read the difference."""


def test_what_is_shown_is_the_golden_text() -> None:
    texts = [f"==== {name}\n{shown(one, 120)}---- {plain_line(one)}\n" for name, one in STATUSES.items()]
    text = "\n".join(line.rstrip() for line in "".join(texts).splitlines()) + "\n"
    if os.environ.get("DIPS_REWRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text.splitlines() == GOLDEN.read_text().splitlines()


LONGEST = "-".join(["a-long-name"] * 5) + "-xyz"
"""63 characters, which is the most that a name has."""


def long_status() -> StatusReply:
    assert len(check_name(LONGEST, "cluster")) == 63
    other = LONGEST[:-1] + "x"
    reason = f"the layout of {other} differs from that of the run in 3 of its tensors, the first is embedding.weight"
    clusters = (
        cluster_status(LONGEST, phase="BEGINNING_PUSH", last_norm=0.81, cosine_usual=0.4, cosine_rounds=64),
        cluster_status(other, last_verdict="EXCLUDED", last_reason=reason, pushes_excluded=3, pushes_aborted=2),
    )
    merged = RoundSummary(RoundId(1, 14), "void", reason, None, (LONGEST, "b"), (other,))
    slaves = (slave_status(LONGEST, durable=Version(1, 11), served_bytes=123 << 30), slave_status("s0"))
    later = Settings(durability="async")
    return run_status(clusters=clusters, slaves=slaves, recent_rounds=(merged,), settings=later, run_id=LONGEST)


HEADERS = {
    *"cluster phase incarnation steps per s tokens loss pushes".split(),
    *"last verdict norm z-score cosine usual of direction".split(),
    *"slave version on disk memory staging served refused turned away".split(),
    *"round outcome accepted excluded clip share why".split(),
}
"""Words that may be missing where a value is not known."""


@pytest.mark.parametrize("width", [66, 80, 100, 160])
def test_names_and_words_are_never_cut(width: int) -> None:
    for status in (long_status(), run_status()):
        text = shown(status, width)
        assert max(len(line) for line in text.splitlines()) <= width
        words = set(text.replace("─", " ").split())
        wide = set(shown(status, 10_000).replace("─", " ").split())
        assert words <= wide, "no word is in two"
        assert wide - {"-"} <= words | HEADERS, "nothing is left out but what is not known"


def test_a_usual_run_is_a_table_at_80_columns_whatever_its_phase() -> None:
    for phase in ("TRAINING", "BEGINNING_PUSH"):
        named = [cluster_status(name, phase=phase, steps_total=123_456) for name in ("east", "west-2")]
        lines = shown(run_status(clusters=tuple(named)), 80).splitlines()
        assert any(line.split()[:3] == ["west-2", phase, "1.3"] for line in lines)


@pytest.mark.parametrize("phase", ["TRAINING", "AWAITING", "BEGINNING_PUSH"])
def test_a_rank_that_others_wait_for_between_two_steps_is_not_late_in_a_transfer(phase: str) -> None:
    """They may have left the loop while a push of theirs is open."""
    assert late_sentence(cluster_status(phase=phase, ranks=2, late_ranks=(1,))) == (
        "rank 1 is late with a step; the others wait"
    )
