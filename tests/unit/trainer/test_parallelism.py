"""How the ranks of a cluster share the byte model: what `--parallel` may say, and where a process finds its place."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dips.core.config import load
from dips.core.errors import ConfigError
from dips.trainer.config import SECTION, TrainConfig
from dips.trainer.parallelism import Parallelism, Place, place_here


@pytest.mark.parametrize(
    ("text", "parallelism", "shortest"),
    [
        ("", Parallelism(), ""),
        ("fsdp=2", Parallelism(fsdp=2), "fsdp=2"),
        (" fsdp = 2 , tensor=4,", Parallelism(fsdp=2, tensor=4), "fsdp=2,tensor=4"),
        ("tensor=2,pipeline=2,data=1", Parallelism(pipeline=2, tensor=2), "pipeline=2,tensor=2"),
        ("data=1", Parallelism(), ""),
    ],
)
def test_a_text_says_into_how_many_parts_the_work_is_cut(text: str, parallelism: Parallelism, shortest: str) -> None:
    assert Parallelism.parse(text) == parallelism
    assert str(parallelism) == shortest
    assert Parallelism.parse(str(parallelism)) == parallelism


def test_rows_are_dealt_to_copies_and_shards_alone() -> None:
    parallelism = Parallelism(pipeline=2, data=3, fsdp=4, tensor=5)
    assert parallelism.n_ranks == 120
    assert parallelism.n_data == 12


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"parallel": "zero=2"}, "'zero' is no way to share a model: give pipeline=N, data=N, fsdp=N or tensor=N"),
        ({"parallel": "fsdp"}, "'fsdp' has no number of processes: write it as in fsdp=2"),
        ({"parallel": "fsdp=0"}, "'fsdp=0' has no number of processes"),
        ({"parallel": "fsdp=-2"}, "'fsdp=-2' has no number of processes"),
        ({"parallel": "fsdp=2,fsdp=2"}, "has fsdp twice: give it once"),
        ({"parallel": "fsdp=3"}, "batch_size 4 cannot be dealt evenly to the 3 processes .* give a multiple of 3"),
        ({"parallel": "fsdp=2,data=3", "batch_size": "8"}, "to the 6 processes .* give a multiple of 6"),
        ({"parallel": "pipeline=4"}, "the 3 layers of model_size tiny cannot be 4 stages .* give at most 3"),
        ({"parallel": "tensor=2"}, r"the 3 heads of model_size tiny .* model_size with other heads: .*wide \(4\)"),
        (
            {"parallel": "tensor=5", "model_size": "small"},
            "the 8 heads .* that divides its heads and its hidden units$",
        ),
        (
            {"parallel": "tensor=3"},
            "the 256 hidden units of model_size tiny .* that divides its heads and its hidden units$",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(given: Mapping[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(TrainConfig, SECTION, environment={}, overrides=given)


def test_settings_hold_the_shortest_text() -> None:
    config = load(TrainConfig, SECTION, environment={"DIPS_TRAIN_PARALLEL": "tensor=1, fsdp=2"}).value
    assert config.parallel == "fsdp=2"
    assert config.parallelism == Parallelism(fsdp=2)


@pytest.mark.parametrize(
    ("parallelism", "environment", "place"),
    [
        (Parallelism(), {}, Place()),
        (Parallelism(), {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, Place()),
        (Parallelism(fsdp=4), {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}, Place(3, 1)),
    ],
)
def test_torchrun_gives_a_process_its_place(
    parallelism: Parallelism, environment: Mapping[str, str], place: Place
) -> None:
    assert place_here(parallelism, environment) == place
    assert place.leads == (place.rank == 0)


@pytest.mark.parametrize(
    ("parallelism", "environment", "sentence"),
    [
        (Parallelism(fsdp=2), {}, "is for 2 processes and this is one: .*torchrun --nproc-per-node 2 -m dips train"),
        (Parallelism(), {"WORLD_SIZE": "2"}, "2 processes were started .* give --parallel fsdp=2, say"),
        (Parallelism(fsdp=2), {"WORLD_SIZE": "4"}, "is for 2 processes and 4 were started: .* product is 4"),
        (Parallelism(), {"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many' in the environment"),
    ],
)
def test_another_number_of_processes_is_refused(
    parallelism: Parallelism, environment: Mapping[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        place_here(parallelism, environment)
