"""Whom a data port serves: the list decides about every message, whoever the connection belonged to before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.slave_bench import SlaveBench, configure, only
from support.slave_wire import push_id

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Incarnation, Version
from dips.core.messages import Allow, AllowedKey, KeyRole
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.protocol import MAX_ALLOWED_KEYS
from dips.slave.state import effects, tape
from dips.slave.state.admission import Admission, what_is_wrong

KEY_A, KEY_B, KEY_R = (bytes([i]) * 32 for i in (1, 2, 3))
LIST = (
    AllowedKey(KeyRole.CLUSTER, "a", KEY_A),
    AllowedKey(KeyRole.CLUSTER, "b", KEY_B),
    AllowedKey(KeyRole.READER, "a", KEY_R),
)
GET = DataHeader("run", 1, DataOp.GET_CHUNK, 1, version=Version(1, 0), length_bytes=4)
PUSH_A = DataHeader("run", 1, DataOp.QUERY_MISSING, 1, push_id("a"), 1)


@pytest.fixture
def admission() -> Admission:
    admission = Admission()
    admission.set_keys(LIST)
    return admission


def refusal_of(admission: Admission, key: bytes, header: DataHeader) -> str:
    with pytest.raises(Refused) as caught:
        admission.check(key.hex(), header)
    assert caught.value.code is RefusalCode.KEY
    assert caught.value.retry_after_s == 0
    return str(caught.value)


def test_whoever_is_on_the_list_may_read_and_nobody_before_it_came(admission: Admission) -> None:
    assert Admission().user_of(KEY_A) is None
    assert "no longer on the master's list" in refusal_of(Admission(), KEY_A, GET)
    for allowed in LIST:
        assert admission.user_of(allowed.curve_key) == allowed.curve_key.hex()
        admission.check(allowed.curve_key.hex(), GET)


def test_a_push_is_touched_by_its_own_cluster_alone(admission: Admission) -> None:
    admission.check(KEY_A.hex(), PUSH_A)
    assert "not cluster b's" in refusal_of(admission, KEY_B, PUSH_A)
    assert "not reader a's" in refusal_of(admission, KEY_R, PUSH_A)


def test_every_rank_of_a_cluster_may_touch_its_push_and_no_other(admission: Admission) -> None:
    ranks = [b"r" * 32, b"s" * 32]
    admission.set_keys([*LIST, *(AllowedKey(KeyRole.CLUSTER, "a", key) for key in ranks)])
    assert [admission.n_keys_above(most) for most in (1, 2, 3)] == [2, 1, 0]
    for key in ranks:
        admission.check(key.hex(), PUSH_A)
        assert "not cluster a's" in refusal_of(admission, key, replace(PUSH_A, push=push_id("b")))
        assert "only slaves may read the momentum" in refusal_of(admission, key, replace(GET, momentum=True))
    admission.set_keys(LIST)
    assert "no longer on the master's list" in refusal_of(admission, ranks[0], PUSH_A)


def test_a_cluster_with_several_keys_is_named_once_on_the_tape() -> None:
    bench = SlaveBench(curve_key=b"k" * 32)
    bench.attach()
    out = bench.command(Allow((*LIST, AllowedKey(KeyRole.CLUSTER, "a", b"r" * 32))))
    (allowed,) = only(out, tape.KeysAllowed)
    assert allowed.fields["owners"] == ["cluster a", "cluster b", "reader a"]


def test_momentum_is_for_slaves_alone(admission: Admission) -> None:
    key = b"s" * 32
    admission.set_keys([*LIST, AllowedKey(KeyRole.SLAVE, "s1", key)])
    admission.check(key.hex(), replace(GET, momentum=True))
    for allowed in LIST:
        refusal = refusal_of(admission, allowed.curve_key, replace(GET, momentum=True))
        assert "only slaves may read the momentum" in refusal


def test_a_key_that_left_is_refused_from_the_next_message_on(admission: Admission) -> None:
    admission.set_keys(LIST[1:])
    assert admission.user_of(KEY_A) is None
    assert "no longer on the master's list" in refusal_of(admission, KEY_A, GET)
    admission.check(KEY_B.hex(), GET)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ((AllowedKey(KeyRole.CLUSTER, "a", b"short"),), "32 bytes"),
        ((AllowedKey(KeyRole.CLUSTER, "", KEY_A),), "owner"),
        ((AllowedKey(KeyRole.CLUSTER, "a" * 200, KEY_A),), "owner"),
        ((LIST[0], AllowedKey(KeyRole.CLUSTER, "b", KEY_A)), "one key twice"),
        ((LIST[0], LIST[0]), "one key twice"),
        (tuple(AllowedKey(KeyRole.READER, "r", i.to_bytes(32)) for i in range(MAX_ALLOWED_KEYS + 1)), "at most"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(keys: tuple[AllowedKey, ...], why: str) -> None:
    assert why in what_is_wrong(Allow(keys))
    bench = SlaveBench(curve_key=b"k" * 32)
    bench.attach()
    out = bench.command(Allow(keys))
    assert not only(out, Allow)
    assert why in only(out, effects.Log)[0].sentence


def test_a_list_waits_for_no_job_and_one_of_an_older_epoch_or_another_life_changes_nothing() -> None:
    """A revoked key must not be served for as long as a snapshot is loaded."""
    bench = SlaveBench(curve_key=b"k" * 32)
    bench.attach()
    bench.command(configure())
    assert bench.state.shard.busy
    assert only(bench.command(Allow(LIST)), Allow) == [Allow(LIST)]
    bench = SlaveBench(curve_key=b"k" * 32)
    bench.attach(epoch=3)
    for changes in ({"epoch": 2}, {"incarnation": Incarnation(3, 9)}, {"run_id": "other"}):
        assert not only(bench.command(Allow(LIST), **changes), Allow)


def test_without_keys_a_list_is_refused_and_said() -> None:
    bench = SlaveBench()
    bench.attach()
    out = bench.command(Allow(LIST))
    assert not only(out, Allow)
    assert "uses no keys" in only(out, effects.Log)[0].sentence
