"""Groups of devices: the paper's examples, what decides a merge, and that errors of measurements do not matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.profiled import files

from dips.core.errors import ConfigError
from dips.planner.cluster import read_setup
from dips.planner.grouping import Grouping, GroupPart, Measured, group, grouping_json, measured_of

MESSAGE_BYTES = 125e6
"""A gigabit: takes as many seconds as the rate in Gbit/s is small."""

Plain = list[list[list[tuple[str, int]]]]


def plain(found: Grouping) -> Plain:
    """Groups, their subgroups, their sites with numbers of devices."""
    names = found.measured.sites
    return [
        [[(names[part.site], part.devices) for part in inner.parts] for inner in one.subgroups] for one in found.groups
    ]


def measured(
    times_s: Sequence[Sequence[float]], devices: list[int] | None = None, powers: list[float] | None = None
) -> Measured:
    n = len(times_s)
    return Measured(
        file="problem.toml",
        sites=tuple("abcdefgh"[:n]),
        devices=tuple(devices or [1] * n),
        times_s=tuple(map(tuple, times_s)),
        powers=tuple(powers or [1.0] * n),
        power_unit="TFLOP/s",
        message_bytes=MESSAGE_BYTES,
    )


def test_latency_counts_too() -> None:
    """The same bandwidth, and a latency that makes a message slower than the threshold."""
    setup = read_setup("spantrain-setting-2")
    near = group(measured_of(setup))
    far = replace(setup, links=tuple(link.model_copy(update={"latency_ms": 500.0}) for link in setup.links))
    assert len(near.groups) == 1
    assert len(group(measured_of(far)).groups) == 10


def test_a_merge_is_decided_by_the_mean_time_of_a_message() -> None:
    """a and b are near each other; c is near a, far from b. Alone it would merge with a."""
    times_s = [[0, 1, 2], [1, 0, 9], [2, 9, 0]]
    found = group(measured(times_s), threshold_gbps=1 / 5)
    assert [one.parts for one in found.groups] == [(GroupPart(0, 1), GroupPart(1, 1)), (GroupPart(2, 1),)]
    assert [(step.apart, step.merged) for step in found.steps] == [(1, True), (5.5, False)]
    assert len(group(measured(times_s), threshold_gbps=1 / 5.5).groups) == 1
    a, b, c = ({"site": name, "devices": 1} for name in "abc")
    assert grouping_json(found) == {
        "message_bytes": MESSAGE_BYTES,
        "threshold_gbps": 1 / 5,
        "alike": 0.12,
        "power_unit": "TFLOP/s",
        "groups": [
            {
                "devices": 2,
                "subgroups": [{"parts": [a, b], "power": 1.0}],
                "steps": [{"left": [a], "right": [b], "merged": True, "faster_by": 0.0}],
            },
            {"devices": 1, "subgroups": [{"parts": [c], "power": 1.0}], "steps": []},
        ],
        "steps": [
            {"left": [a], "right": [b], "merged": True, "gbps": 1.0},
            {"left": [a, b], "right": [c], "merged": False, "gbps": pytest.approx(1 / 5.5)},
        ],
        "margins": [
            {"level": 1, "error": 0.0, "pair": ["a", "c"]},  # on the other side of the threshold than their groups
            {"level": 2, "error": pytest.approx(0.12 / 2.12), "pair": ["a", "b"]},
        ],
    }


def test_a_large_group_counts_by_its_devices() -> None:
    """a's three devices and b's one: the mean time to c is over four pairs, three of them slow."""
    times_s = [[1, 1, 8], [1, 0, 4], [8, 4, 0]]
    found = group(measured(times_s, [3, 1, 1]), threshold_gbps=1 / 7)
    assert found.steps[-1].apart == (3 * 8 + 4) / 4 == 7
    assert len(found.groups) == 1
    assert len(group(measured(times_s, [3, 1, 1]), threshold_gbps=1 / 6.9).groups) == 2


def test_devices_of_a_site_merge_one_by_one_or_not_at_all() -> None:
    """One merges with b before it would with the other; the mean of both decides then."""
    found = group(measured([[6, 9], [9, 2]], [3, 4]), threshold_gbps=1 / 5)
    assert [one.parts for one in found.groups] == [(GroupPart(0, 1),)] * 3 + [(GroupPart(1, 4),)]
    found = group(measured([[4, 1], [1, 0]], [2, 1]), threshold_gbps=1 / 3)
    assert [one.parts for one in found.groups] == [(GroupPart(0, 2), GroupPart(1, 1))]
    assert [step.apart for step in found.steps] == [1, 2.5]


def test_subgroups_by_speed() -> None:
    """Of 100, 108, 118 and 240: the nearest merge first, and then by their mean (104 and 118 are 13.5 % apart)."""
    none = [[0.0] * 4] * 4
    found = group(measured(none, powers=[118, 240, 100, 108]))
    (one,) = found.groups
    assert [(inner.parts, inner.power) for inner in one.subgroups] == [
        ((GroupPart(0, 1),), 118),
        ((GroupPart(1, 1),), 240),
        ((GroupPart(2, 1), GroupPart(3, 1)), 104),
    ]
    assert [step.merged for step in one.steps] == [True, False, False, False]


def test_times_and_speeds_of_a_profile(tmp_path: Path) -> None:
    """A message of two sequences takes the latency and its bytes over the bandwidth, the mean of both ways. p_c: of
    each layer the quarter of 1 / its time: 36, 33, 33 and 75 ms with the embedding and the output, or 90."""
    found = measured_of(read_setup(files(tmp_path, ('device = "fast"\n', 'device = "fast"\nnetwork_gbps = 100\n'))))
    size = 2 * 128 * 64 * 2
    assert found.message_bytes == size
    assert found.times_s[0][1] == found.times_s[1][0] == pytest.approx((0.007 + 0.008 + size * 8 * (2 + 4) / 1e9) / 2)
    assert found.times_s[0][0] == pytest.approx(size * 8 / 100e9)
    assert found.times_s[1][1] == 0
    assert found.powers == pytest.approx(((1 / 36 + 2 / 33 + 1 / 75) / 4 * 1e3, 1e3 / 90))
    assert found.power_unit == "layers/s"
    # As a layer of its own the embedding does not count.
    apart = measured_of(read_setup(files(tmp_path, ("microbatches = 4", "extra_layers = 1\nmicrobatches = 4"))))
    assert apart.powers[0] == pytest.approx((3 / 33 + 1 / 75) / 4 * 1e3)


def test_more_devices_than_can_be_compared() -> None:
    with pytest.raises(ConfigError, match=r"problem\.toml \[\[sites\]\] 2: devices = 300, and .* lower --threshold"):
        group(measured([[1, 9], [9, 9]], [4000, 300]))
    assert [one.devices for one in group(measured([[1, 9], [9, 1]], [4000, 3000])).groups] == [4000, 3000]
