"""What a person and a script see of a status."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console
from support.run_status import cluster_status, run_status, slave_status

from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version, check_name
from dips.core.messages import RoundSummary, Settings, StatusReply
from dips.local.view import headline, number, plain_line, status_json, status_view


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


def test_json_says_null_for_what_is_not_known() -> None:
    raw = status_json(run_status(published=None, clusters=(cluster_status(loss=float("nan"), base=None),)))
    assert raw["published"] is None
    assert raw["clusters"][0]["loss"] is None
    assert raw["clusters"][0]["base"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Version(2, 3), "2:3"),
        (RoundId(1, 2), "r1.2"),
        (PushId(ClusterId("a"), Incarnation(1, 2), 3), "a/1.2#3"),
        (b"\x01\xff", "01ff"),
    ],
)
def test_json_of_ids(value: object, text: str) -> None:
    assert status_json(value) == text


def test_the_reason_to_wait_stands_above_the_tables() -> None:
    text = shown(run_status(waiting_for="slave s1 is away"))
    assert text.index("waiting: slave s1 is away") < text.index("clusters")
    assert "waiting" not in shown(run_status())
    assert "waiting: waiting" not in shown(run_status(waiting_for="waiting for slaves: 1 of 2 have attached"))


def test_between_two_rounds_no_round_is_open() -> None:
    assert "no open round" in shown(run_status(round=None, phase="IDLE"))
    assert "IDLE" not in shown(run_status(round=None, phase="IDLE"))


def test_a_cluster_of_several_ranks_says_so_and_names_the_late_ones() -> None:
    four, one = cluster_status(ranks=4, late_ranks=(1, 3)), cluster_status(cluster_id="one", ranks=1)
    text = shown(run_status(clusters=(four, one)))
    assert f"{four.cluster_id} (4 ranks)" in text
    assert "one (" not in text
    told = f"cluster {four.cluster_id}: ranks 1, 3 are late in a transfer; the other 2 are done"
    assert told in text
    assert told in plain_line(run_status(clusters=(four, one)))
    assert "late" not in shown(run_status(clusters=(one,)))


def test_a_recovery_stands_above_the_reason_to_wait() -> None:
    status = run_status(recovery="slave s1 lost version 3:7; going back to 3:5", waiting_for="slave s1 is away")
    text = shown(status)
    assert text.index("recovering: slave s1 lost version 3:7; going back to 3:5") < text.index("waiting: slave s1")
    assert "recovering: slave s1 lost" in plain_line(status)
    assert "recovering" not in shown(run_status())
    assert "recovering" not in plain_line(run_status())


def test_what_is_on_disk_is_shown_when_it_may_differ_from_what_is_published() -> None:
    later = Settings(durability="async")
    slaves = (slave_status("s0", durable=Version(1, 11)), slave_status("s1", durable=None))
    status = run_status(settings=later, durable=None, slaves=slaves)
    assert "version 1:12 (on every disk: none yet)" in shown(status)
    assert "on disk" in shown(status)
    assert "1:11" in shown(run_status(settings=later, slaves=slaves, clusters=()))
    assert "version 1:12 (on every disk: 1:10)" in plain_line(run_status(settings=later, durable=Version(1, 10)))
    assert "disk" not in shown(run_status())


def test_clusters_show_phase_life_loss_and_verdict_with_its_reason() -> None:
    excluded = cluster_status(
        "c", last_verdict="EXCLUDED", last_reason="norm 31 is 30 times the median", pushes_excluded=2
    )
    text = shown(run_status(clusters=(cluster_status(), excluded)))
    for word in ("TRAINING", "1.3", "2.310", "12 applied, 2 excluded", "EXCLUDED: norm 31 is 30 times the median"):
        assert word in text


def test_a_quarantined_cluster_is_marked() -> None:
    assert "(quarantined)" in shown(run_status(clusters=(cluster_status(quarantined=True),)))


def test_the_last_judged_pushes_are_shown_when_there_are_some() -> None:
    judged = cluster_status(last_norm=0.8123, last_z=-1.25, last_cosine=0.456, cosine_usual=0.41, cosine_rounds=12)
    text = shown(run_status(clusters=(judged, cluster_status("b"))))
    row = next(line for line in text.splitlines() if "12 pushes" in line)
    assert row.split() == ["a", "0.812", "-1.25", "0.46", "0.41", "12", "pushes", "-"]
    assert next(line for line in text.splitlines() if "0 pushes" in line).split()[:5] == ["b", "-", "-", "-", "-"]
    assert "last judged pushes" not in shown(run_status())


def test_a_direction_alarm_stands_above_the_tables_and_in_the_plain_line() -> None:
    bad = cluster_status("d", last_norm=0.8, cosine_usual=0.01, cosine_rounds=12, direction_alarm=True)
    status = run_status(clusters=(cluster_status(), bad))
    text = shown(status)
    assert text.index("direction alarm: d (its pushes are merged all the same") < text.index("clusters")
    assert "ALARM" in text
    assert "direction alarm: d" in plain_line(status)
    assert "direction alarm" not in shown(run_status())
    assert "direction alarm" not in plain_line(run_status())
    assert status_json(status)["clusters"][1]["direction_alarm"] is True


def test_a_run_whose_clusters_report_no_loss_is_told_how_to() -> None:
    silent = cluster_status("a", loss=float("nan"), pushes_applied=1, steps_per_s=2.0)
    told = " ".join(shown(run_status(clusters=(silent,))).split())
    assert "no cluster reports a loss: write sync.report(loss) before optimizer.step()" in told
    first_steps = dataclasses.replace(silent, pushes_applied=0)
    for clusters in ((first_steps,), (silent, cluster_status("b", loss=2.5)), ()):
        assert "reports a loss" not in shown(run_status(clusters=clusters))


def test_a_direction_alarm_of_a_cluster_that_is_gone_is_not_told_as_if_it_pushed() -> None:
    gone = cluster_status("d", cosine_usual=0.01, cosine_rounds=12, direction_alarm=True, alive=False)
    status = run_status(clusters=(cluster_status(), gone))
    assert "direction alarm" not in shown(status)
    assert "direction alarm" not in plain_line(status)


def test_json_has_the_measures_of_the_last_push() -> None:
    raw = status_json(run_status(clusters=(cluster_status(last_norm=0.5, cosine_rounds=3),)))["clusters"][0]
    keys = ("last_norm", "last_z", "last_cosine", "cosine_usual", "cosine_rounds", "direction_alarm")
    assert [raw[key] for key in keys] == [0.5, None, None, None, 3, False]


def test_who_is_gone_is_still_listed() -> None:
    gone = run_status(
        clusters=(cluster_status("b", alive=False, phase=""),), slaves=(slave_status("s0", alive=False, phase=""),)
    )
    assert shown(gone).count("gone") == 2


def test_rounds_are_listed_with_what_was_merged() -> None:
    void = RoundSummary(RoundId(1, 14), "void", "all were rejected", None, (), ("a", "b"))
    text = shown(run_status(recent_rounds=(void,)))
    for word in ("r1.14", "void", "a b", "all were rejected"):
        assert word in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_width_can_be_shown(width: int) -> None:
    assert max(len(line) for line in shown(run_status(), width).splitlines()) <= width


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"stopped": True}, "stopped"), ({"stopping": True}, "stopping"), ({"paused": True}, "paused")],
)
def test_the_headline_says_when_the_run_does_not_go_on(changes: dict[str, bool], word: str) -> None:
    assert headline(run_status(**changes)).plain.endswith(word)


def test_the_headline_counts_lost_rounds_only_when_there_are_some() -> None:
    assert "13 rounds published (9 with two or more pushes)" in headline(run_status()).plain
    assert "1 round published (0 with" in headline(run_status(rounds_committed=1, rounds_merged=0)).plain
    assert "void" not in headline(run_status()).plain
    assert "2 void, 1 aborted" in headline(run_status(rounds_void=2, rounds_aborted=1)).plain


def test_calls_that_were_refused_because_of_whose_they_were_are_told() -> None:
    last = "Join: the certificate of cluster b was revoked"
    refused = run_status(refused_calls=12, refused_call=last)
    sentence = f"12 calls were refused because of whose they were, the last: {last}"
    assert sentence in shown(refused)
    assert sentence in plain_line(refused)
    assert "1 call was refused" in plain_line(run_status(refused_calls=1, refused_call=last))
    assert "refused because" not in shown(run_status()) + plain_line(run_status())


def test_a_run_without_a_goal_shows_no_share() -> None:
    assert "400k/1M (40%)" in headline(run_status()).plain
    assert "%" not in headline(run_status(tk_max_tokens=0)).plain


def test_the_plain_line_holds_everything_in_one_line() -> None:
    line = plain_line(run_status(waiting_for="nothing"))
    assert "\n" not in line
    for word in ("version 1:12", "400k", "round r1.13 WINDOW", "a:TRAINING loss 2.310", "waiting: nothing"):
        assert word in line
    assert plain_line(run_status(clusters=())).count("|") == 0


@pytest.mark.parametrize(("value", "text"), [(1.25, "1.2"), (float("nan"), "-"), (float("inf"), "-"), (0.0, "0.0")])
def test_numbers_that_are_not_known_are_a_dash(value: float, text: str) -> None:
    assert number(value, 1) == text


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
