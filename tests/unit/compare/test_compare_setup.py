"""Set-ups of a comparison and its methods: what files may say, what is refused, what `dips master` would be told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dips.core.errors import ConfigError
from dips.core.wire import Codec
from dips.lab.compare.engine import link_plan, plan_of, timing_data, timing_layout
from dips.lab.compare.methods import METHODS, find_method
from dips.lab.compare.setup import ComparisonSetup, load_setup, shipped
from dips.lab.compare.speed import SPEED_FIGURES, speed_jobs
from dips.master.config import MasterConfig

SERVED = [method for method in METHODS.values() if method.kind == "servers"]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def changed(cluster: str, at: str = "'5 s'", **values: object) -> str:
    """One table [[changes]]."""
    lines = [f"{name} = {value}" for name, value in {"at": at, "cluster": f"'{cluster}'", **values}.items()]
    return "\n".join(["[[changes]]", *lines, ""])


def test_amounts_carry_units_and_one_rate_holds_for_all(tmp_path: Path) -> None:
    text = """
    [run]
    tokens = "20k"
    [clusters]
    fastest_step = "250 ms"
    gaps = [0, 1]
    [links]
    up = "1 Gbps"
    down = ["2 Gbps", 0]
    """
    setup = load_setup(written(tmp_path, text))
    assert (setup.run.tokens, setup.step_s) == (20_000, (0.25, 0.5))
    assert (setup.up_bits_per_s, setup.down_bits_per_s) == ((1e9, 1e9), (2e9, 0.0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[runs]\n", "'runs' is unknown; did you mean 'run'?"),
        ("[run]\ntoken = 5\n", "'token' is not a setting; did you mean 'tokens'?"),
        ("run = 3\n", "'run' is not a table"),
        ("[clusters]\ngaps = []\n", "gaps has 0 entries"),
        ("[clusters]\ngaps = [0, -0.1]\n", "gaps holds -0.1"),
        ("[links]\nup = ['1 Gbps', '2 Gbps']\n", "up has 2 rates for 4 clusters"),
        ("[links]\nup = 'fast'\n", "'fast' is not a rate"),
        ("[model]\nsize = 'huge'\n", "choose one of tiny, small"),
        ("[figures]\n2c = ['DP']\n", "'2c' is not a setting; choose one of 12, 2b, 7"),
        ("[figures]\n7 = 'DP'\n", "figures"),
        ("[master]\nlisten = '127.0.0.1:1'\n", "'listen' has no meaning in a simulation"),
        ("[master]\nsync_every = 3\n", "'sync_every' follows from [run] inner_steps"),
        ("[master]\nouter_rl = 0.7\n", "'outer_rl' is not a setting; did you mean 'outer_lr'?"),
        ("[master]\nouter_lr = -1\n", "outer_lr = -1"),
        ("changes = 3\n", "'changes' is not a list of tables"),
        (changed("b", step_factor=2, at="'0 s'"), "[[changes]] 1: at = '0 s'"),
        (changed("b"), "nothing changes: give step_factor, jitter, up, down or presence"),
        (changed("b", presence="'gone'"), "presence = 'gone'"),
        (changed("b", steps=2), "'steps' is not a setting"),
        (changed("e", jitter=0.1), "[[changes]] 1: there is no cluster 'e': choose one of a, b, c, d"),
        (changed("b", presence="'killed'") * 2, "cluster b is not here at 5 s, so that it cannot be: killed"),
        (changed("b", presence="'comes'") * 2, "cluster b is here already at 5 s, so that it cannot be: comes"),
        ("".join(changed(name, presence="'leaves'") for name in "abcd"), "no cluster is here from 5 s on"),
        ("".join(changed(name, presence="'comes'") for name in "abcd"), "no cluster is here from 0 s on"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_setup(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


CHANGING = (
    changed("b", at="'10 s'", presence="'comes'")
    + changed("a", at="'20 s'", step_factor=2, jitter=0.25)
    + changed("c", at="'20 s'", presence="'killed'", up="'3 Mbps'")
    + changed("a", at="'30 s'", step_factor=1, down="'4 Mbps'")
    + changed("c", at="'40 s'", presence="'comes'")
)


def changing(tmp_path: Path, text: str = CHANGING) -> ComparisonSetup:
    """One token a step; a, b and c make a step in 1, 2 and 4 s."""
    tables = "[clusters]\ngaps = [0, 1, 3]\n[inner]\nbatch_size = 1\nsequence_tokens = 1\n"
    return load_setup(written(tmp_path, tables + text))


def test_a_change_holds_until_the_next_one_and_ideal_counts_who_is_there(tmp_path: Path) -> None:
    setup = changing(tmp_path)
    assert [one.present for one in setup.conditions(0.0)] == [True, False, True]
    assert setup.first_names == ("a", "c")
    a, b, c = setup.conditions(20.0)
    assert (a.step_s, a.jitter, a.up_bits_per_s, b.present) == (2.0, 0.25, 0.0, True)
    assert (c.step_s, c.present, c.up_bits_per_s, c.down_bits_per_s) == (4.0, False, 3e6, 0.0)
    a, _, c = setup.conditions(1e9)
    assert (a.step_s, a.jitter, a.down_bits_per_s, c.present, c.up_bits_per_s) == (1.0, 0.25, 4e6, True, 3e6)
    assert setup.least_bits_per_s == 3e6
    assert setup.master_config(find_method("dips")).min_clusters == 2
    assert setup.ideal_tokens(10.0) == pytest.approx(10 * (1 + 1 / 4))
    assert setup.ideal_tokens(25.0) == pytest.approx(10 * (1 + 1 / 4) + 10 * (1 + 1 / 2 + 1 / 4) + 5 * (1 / 2 + 1 / 2))
    assert setup.present_s(50.0) == {"a": 50.0, "b": 40.0, "c": 30.0}
    assert setup.least_tokens_per_s == 1.0
    steady = load_setup("small")
    assert steady.ideal_tokens(7.0) == pytest.approx(7 * steady.ideal_tokens_per_s)
    assert setup.with_overrides(tokens=1000).changes == setup.changes
    assert setup.digest() != changing(tmp_path, "").digest()
    words = dict(setup.describe())["changes"]
    assert words.startswith("10 s b comes; 20 s a steps x 2, jitter 25%; 20 s c up 3 Mbit/s, is killed")
    with pytest.raises(ConfigError, match="there is no cluster 'c'"):
        setup.with_overrides(gaps=[0, 1])


def test_set_ups_that_do_not_fit_a_method_or_figure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method dp needs every cluster in every step.*leave dp out of --methods"):
        changing(tmp_path).check(find_method("dp"))
    load_setup("changing-speed").check(find_method("dp"))
    changing(tmp_path).check(find_method("dips"))
    with pytest.raises(ConfigError, match="set-up changing-speed changes in the run"):
        speed_jobs(SPEED_FIGURES["9"], [load_setup("changing-speed")], 1)


def test_overrides_change_what_they_name_and_must_fit() -> None:
    setup = load_setup("small")
    other = setup.with_overrides(gaps=[0.0, 2.0], inner_steps=64, tokens=1000, master={"outer_lr": 0.5})
    assert (other.step_s, other.run.inner_steps, other.run.tokens) == ((1.0, 3.0), 64, 1000)
    assert other.master["outer_lr"] == 0.5
    assert (other.inner, other.servers, other.name) == (setup.inner, setup.servers, setup.name)
    assert setup.with_overrides() == setup
    warmer = setup.with_overrides(lr=1e-3)
    assert (warmer.inner.lr, warmer.inner.grad_clip, warmer.run) == (1e-3, setup.inner.grad_clip, setup.run)
    assert warmer.digest() != setup.digest()
    with pytest.raises(ConfigError, match="4 rates for 3 clusters"):
        load_setup("emulated").with_overrides(gaps=[0, 1, 2])
    with pytest.raises(ConfigError, match="inner_steps"):
        load_setup("small").with_overrides(inner_steps=0)
    for rate in (0.0, -1e-3, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="lr"):
            load_setup("small").with_overrides(lr=rate)


def test_the_digest_is_of_what_decides_and_not_of_words(tmp_path: Path) -> None:
    setup = load_setup("small")
    text = (Path(__file__).parents[3] / "src/dips/lab/compare/setups/small.toml").read_text()
    renamed = load_setup(written(tmp_path, text))
    assert renamed.digest() == setup.digest()


@pytest.mark.parametrize("name", shipped())
def test_each_method_of_a_shipped_set_up_is_a_master_that_would_start(name: str) -> None:
    setup = load_setup(name)
    assert (setup.name, all(dict(setup.describe()).values())) == (name, True)
    for method in SERVED:
        config = setup.master_config(method).to_run_config()
        told = (config.settings.sync_every_steps, config.settings.tk_max_tokens, config.min_clusters)
        assert told == (setup.run.inner_steps, setup.run.tokens, len(setup.first_names))
        flags = [flag.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_") for flag in method.flags()]
        assert flags == list(method.master)
        assert set(flags) <= set(MasterConfig.model_fields)


def test_flags_and_wire_types() -> None:
    flags = find_method("diloco").flags()
    assert "--no-participation-scaling" in flags
    assert "--grace-s '6 h'" in flags
    assert "--clip-norm inf" in flags
    method = find_method("dips-int8")
    assert method.flags_of_clusters() == ("--wire-dtype int8",)
    assert find_method("dips").flags_of_clusters() == ()
    setup = load_setup("small")
    plan = plan_of(setup, method, timing_layout(setup), timing_data(setup))
    assert {plan.session_config(name).wire for name in plan.clusters} == {Codec.INT8}


def test_a_method_of_fewer_bytes_differs_from_the_default_in_its_wire_types_alone() -> None:
    setup = load_setup("small")
    plain = setup.master_config(find_method("dips")).to_run_config()
    wires = {("float32", "float32"): ["dips"]}
    for method in (method for method in SERVED if method.name.startswith(("dips-pull", "dips-both", "dips-int"))):
        config = setup.master_config(method).to_run_config()
        pulled = config.settings.pull_wire
        wires.setdefault((method.wire_dtype, pulled), []).append(method.name)
        assert config == replace(plain, settings=replace(plain.settings, pull_wire=pulled))
    assert {len(names) for names in wires.values()} == {1}
    assert wires["int4", "int4"] == ["dips-both-int4"]


def test_links_of_a_plan_carry_the_large_model_that_a_small_one_stands_for() -> None:
    setup = load_setup("emulated")
    layout = timing_layout(setup)
    links = link_plan(setup, 4 * layout.n_elems)
    assert setup.wire_bytes() == 4 * 1_240_000_000
    assert links.wire_factor * 4 * layout.n_elems == pytest.approx(setup.wire_bytes())
    assert links.rates["a"].up_bits_per_s == 10e9
    assert links.rates["s0"].down_bits_per_s == 25e9
