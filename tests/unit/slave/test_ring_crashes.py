"""Power is lost before every step of the ring's disk, in every way that it can be: what was said to be durable is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.slave_disk import CrashDisk, Image, PowerLossError

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.slave.disk import Promise
from dips.slave.ring import Ring

N = 3
KEPT = 2
Key = tuple[Version, RoundId]


def info(v: int, timeline: int = 1, n: int | None = None, digest: int | None = None) -> SnapshotInfo:
    round_id = RoundId(timeline, v + 1 if n is None else n)
    content = b"digest%d" % (round_id.n if digest is None else digest)
    return SnapshotInfo(Version(timeline, v), round_id, b"layout", b"place", content, committed=False)


def arrays(what: SnapshotInfo) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(list(what.digest))
    return rng.standard_normal(N).astype(np.float32), rng.standard_normal(N).astype(np.float32)


def key(what: SnapshotInfo) -> Key:
    return (what.version, what.round)


def record_of(what: SnapshotInfo) -> bytes:
    return f"the record of {what.version} {what.round}".encode()


@dataclass
class Said:
    committed: dict[Key, SnapshotInfo] = field(default_factory=dict)
    shadow: SnapshotInfo | None = None
    under_way: SnapshotInfo | None = None

    def newest(self, n: int) -> list[SnapshotInfo]:
        return [self.committed[k] for k in sorted(self.committed, reverse=True)[:n]]


class Life:
    def __init__(self, disk: CrashDisk) -> None:
        self.said = Said()
        self.ring = Ring(disk, "run", "s0", KEPT)
        self.ring.scan()

    def configure(self) -> None:
        self.ring.close_round()
        self.ring.make(N)

    def prepare(self, what: SnapshotInfo) -> None:
        self.said.shadow, self.said.under_way = None, what
        self.ring.write_shadow(what, *arrays(what))
        self.said.shadow = what

    def commit(self, what: SnapshotInfo) -> None:
        self.said.under_way = what
        done = self.ring.commit(what, b"hash", record_of(what))
        self.said.committed[key(what)] = done
        self.said.shadow = None
        assert self.ring.tidy(done) == []

    def step(self, what: SnapshotInfo) -> None:
        self.prepare(what)
        self.commit(what)

    def abort(self, what: SnapshotInfo) -> None:
        self.said.shadow = None
        self.ring.drop_shadow(what)


def rounds(life: Life) -> None:
    """Five versions on three files, with a round that was aborted and one that was not decided."""
    life.configure()
    for v in range(3):
        life.step(info(v))
    life.prepare(info(3, n=50))
    life.abort(info(3, n=50))
    life.step(info(3, n=51))
    life.configure()
    life.step(info(4, n=52))
    life.prepare(info(5, n=53))


def crashed_lives(play: Callable[[Life], None], image: Image | None = None) -> list[tuple[Said, list[Image], str]]:
    """For every step of the disk: what was said before the power was lost there, and all that may be found."""
    whole = CrashDisk(image)
    play(Life(whole))
    out = []
    for steps in range(len(whole.log) + 1):
        disk = CrashDisk(image, steps)
        life = Life(disk)
        try:
            play(life)
        except PowerLossError as lost:
            out.append((life.said, disk.images(), f"before step {steps}: {lost}"))
        else:
            assert steps == len(whole.log)
            out.append((life.said, disk.images(), "at the end"))
    return out


def found_on(image: Image) -> Ring:
    """A start after the power came back; everything that it offers is what was written under that name."""
    ring = Ring(CrashDisk(image), "run", "s0", KEPT)
    ring.scan()
    for what in ring.infos():
        theta, momentum = np.empty(N, np.float32), np.empty(N, np.float32)
        ring.load(what, theta, momentum)
        np.testing.assert_array_equal(theta, arrays(what)[0])
        np.testing.assert_array_equal(momentum, arrays(what)[1])
        if what.committed:
            assert ring.record(what.version, what.round) == (record_of(what), b"hash")
    return ring


def test_every_loss_of_power_at_every_step_leaves_what_was_said_to_be_durable() -> None:
    n_images = 0
    for said, images, where in crashed_lives(rounds):
        for image in images:
            n_images += 1
            ring = found_on(image)
            here = {key(what): what for what in ring.infos()}
            for what in said.newest(KEPT):
                assert here.get(key(what)) == what, where
            if said.shadow is not None:
                assert key(said.shadow) in here, where
            allowed = {*said.committed, *(key(w) for w in (said.shadow, said.under_way) if w)}
            assert all(k in allowed for k, what in here.items() if what.committed), where
    assert n_images > 250


def test_life_goes_on_after_every_loss_of_power() -> None:
    for said, images, where in crashed_lives(rounds):
        for image in images:
            life = Life(CrashDisk(image))
            life.configure()
            life.step(info(8, n=80))
            life.step(info(9, n=90))
            here = {key(what): what for what in life.ring.infos()}
            assert [what.version.v for what in life.ring.infos()[:2]] == [9, 8], where
            assert all(here[k].committed for k in (key(info(8, n=80)), key(info(9, n=90))))
            assert len(life.ring.infos()) <= KEPT + 1
        assert said is not None


ORIGIN = info(3, n=51)
NAMED = replace(info(3, timeline=7, n=1), digest=ORIGIN.digest)
LOST = (info(4, n=52), info(5, n=53))


def roll_back(ring: Ring) -> SnapshotInfo:
    """What a Configure with an origin does, as often as it comes."""
    here = {key(what): what for what in ring.infos()}
    source = here.get(key(NAMED)) or here[key(ORIGIN)]
    ring.close_round()
    ring.make(N)
    theta, momentum = np.empty(N, np.float32), np.empty(N, np.float32)
    ring.load(source, theta, momentum)
    np.testing.assert_array_equal(theta, arrays(ORIGIN)[0])
    np.testing.assert_array_equal(momentum, arrays(ORIGIN)[1])
    named, problems = ring.adopt(source, NAMED, ORIGIN.version, b"hash", record_of(NAMED))
    assert problems == []
    return named


def rolled_back(life: Life) -> None:
    roll_back(life.ring)


def test_a_rollback_is_the_same_after_a_loss_of_power_at_any_step_and_again_at_any_step_of_the_second_try() -> None:
    n_images, disk = 0, CrashDisk()
    rounds(Life(disk))
    (before,) = disk.images()
    for _, images, where in crashed_lives(rolled_back, before):
        for image in images:
            for _, again, where_again in crashed_lives(rolled_back, image):
                for last in again:
                    n_images += 1
                    check_rolled_back(last, f"{where}, then {where_again}")
    assert n_images > 20


def check_rolled_back(image: Image, where: str) -> None:
    ring = found_on(image)
    origin_or_new = [what for what in ring.infos() if what.committed and what.digest == ORIGIN.digest]
    assert len(origin_or_new) == 1, where
    named = roll_back(ring)
    assert (named.version, named.round, named.committed) == (NAMED.version, NAMED.round, True), where
    assert key(LOST[0]) not in {key(what) for what in ring.infos() if what.committed}, where
    ring.write_shadow(info(4, timeline=7, n=2), *arrays(info(4, timeline=7, n=2)))
    assert named in ring.infos(), where


def test_a_promise_that_was_said_is_never_lost() -> None:
    whole = CrashDisk()
    promise_twice(whole, [])
    for steps in range(len(whole.log) + 1):
        disk, said = CrashDisk(None, steps), [0]
        try:
            promise_twice(disk, said)
        except PowerLossError:
            pass
        for image in disk.images():
            assert Promise(CrashDisk(image)).epoch in (said[-1], {0: 3, 3: 5, 5: 5}[said[-1]])


def promise_twice(disk: CrashDisk, said: list[int]) -> None:
    promise = Promise(disk)
    for epoch in (3, 2, 5):
        promise.save(epoch)
        said.append(promise.epoch)


@pytest.mark.parametrize("call", ["remove", "write", "sync r", "create", "sync .", "rename", "sync names"])
def test_an_error_at_any_step_is_a_refusal_and_the_next_try_succeeds(call: str) -> None:
    """Not a loss of power: the process lives on and tries again."""

    class Failing(CrashDisk):
        armed = False

        def _step(self, what: str) -> None:
            if self.armed and what.startswith(call):
                self.armed, self.fail_next = False, OSError(28, "No space left on device")
            super()._step(what)

    disk = Failing()
    life = Life(disk)
    life.configure()
    for v in range(3):
        life.step(info(v))
    disk.armed = True
    with pytest.raises(Refused, match="No space left on device") as caught:
        life.step(info(3))
    assert caught.value.code is RefusalCode.DISK
    for image in disk.images():
        assert {key(info(1)), key(info(2))} <= {key(what) for what in found_on(image).infos() if what.committed}
    if key(info(3)) not in {key(what) for what in life.ring.infos()}:
        life.prepare(info(3))
    life.commit(info(3))
    assert [what.version.v for what in life.ring.infos() if what.committed][:2] == [3, 2]
