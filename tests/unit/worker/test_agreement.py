"""What a cluster's ranks agree on before anything is sent: threads in place of processes, plain tensors as shards."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.rank_table import RankTable, Seat

from dips.core.errors import ConfigError
from dips.worker.parallel.agreement import Agreed, agree, merged
from dips.worker.parallel.held import DataPlace, Held, Row, ShardOf, Shards, held_here
from dips.worker.parallel.ownership import Piece
from dips.worker.parallel.replicas import SAMPLE_STRIDE, Replicas
from dips.worker.torch_model import TorchParameters


def module(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, key = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(key, torch.nn.Parameter(tensor.clone()))
    return root


def held(tensors: Mapping[str, torch.Tensor], **arguments: Any) -> Held:
    made = module(tensors)
    return held_here([made], [torch.optim.SGD(made.parameters(), lr=0.1)], **arguments)


def agreed(
    *ranks: Held | Exception | None, settings: Sequence[Mapping[str, object]] | None = None, **arguments: Any
) -> list[Agreed | str | None]:
    table = RankTable(len(ranks))

    def one(seat: Seat) -> Agreed | None:
        mine = agree(seat, ranks[seat.rank], {} if settings is None else settings[seat.rank], **arguments)
        if mine is not None:
            Replicas(seat, mine).agree(replicas=bool(arguments.get("replicas")))
        return mine

    return table.together(one)


def refused(*ranks: Held | Exception | None, **arguments: Any) -> str:
    said = agreed(*ranks, **arguments)
    assert len(set(map(str, said))) == 1, said
    assert isinstance(said[0], str)
    return said[0]


def whole(*ranks: Held, **arguments: Any) -> list[Agreed]:
    said = agreed(*ranks, **arguments)
    assert all(isinstance(each, Agreed) for each in said), said
    return [each for each in said if isinstance(each, Agreed)]


FULL = {"embed.w": torch.arange(12.0).view(4, 3), "layers.0.w": torch.arange(8.0), "head.w": torch.arange(6.0)}


def layout_of_one_process(tensors: Mapping[str, torch.Tensor]) -> bytes:
    made = module(tensors)
    return TorchParameters(made, torch.optim.SGD(made.parameters(), lr=0.1)).layout().layout_hash


def test_replicas_have_the_layout_of_one_process_and_train_on_different_data() -> None:
    first, second = whole(held(FULL), held(FULL))
    assert first.layout.layout_hash == second.layout.layout_hash == layout_of_one_process(FULL)
    assert first.held == second.held
    assert first.held[0] == first.held[1] == (
        Piece(0, (0, 0), (4, 3)), Piece(1, (0,), (8,)), Piece(2, (0,), (6,)),
    )  # fmt: skip
    assert first.coordinates == (0, 1)


def test_mapped_shards_and_stages_are_pieces_of_one_layout() -> None:
    embed = FULL["embed.w"]
    upper = held(
        {"embed.w": embed[:3], "layers.0.w": FULL["layers.0.w"]}, shards={"embed.w": ShardOf("embed.w", (4, 3), (0, 0))}
    )
    lower = held({"part": embed[3:], "top": FULL["head.w"]}, shards={
        "part": ShardOf("embed.w", (4, 3), (3, 0)), "top": ShardOf("head.w"),
    })  # fmt: skip
    first, second = whole(upper, lower)
    assert first.layout.layout_hash == layout_of_one_process(FULL)
    assert first.held == (
        (Piece(0, (0, 0), (3, 3)), Piece(1, (0,), (8,))),
        (Piece(0, (3, 0), (1, 3)), Piece(2, (0,), (6,))),
    )
    assert [tensor.tolist() for tensor in second.tensors()] == [embed[3:].tolist(), FULL["head.w"].tolist()]
    assert first.coordinates == (0, 0), "parts of one model see the same data"


def test_a_tie_of_two_stages_is_one_parameter() -> None:
    tied = {"head.w": FULL["embed.w"], "norm.w": torch.ones(2)}
    both = whole(held({"embed.w": FULL["embed.w"]}), held(tied, shards={"head.w": ShardOf("embed.w")}))
    assert [parameter.name for parameter in both[0].layout.parameters] == ["embed.w", "norm.w"]
    assert both[0].held == ((Piece(0, (0, 0), (4, 3)),), (Piece(0, (0, 0), (4, 3)), Piece(1, (0,), (2,))))


@pytest.mark.parametrize(
    ("lists", "order"),
    [
        ([["embed", "layers.0.w", "layers.1.w"], ["layers.2.w", "norm"]], None),
        ([["embed", "layers.0.w", "layers.2.w"], ["layers.1.w", "layers.3.w", "norm", "head"]], None),
        ([["embed", "layers.0.w", "layers.3.w", "norm", "head"], ["layers.1.w", "layers.2.w"]], None),
        ([["embed", "layers.0.w", "norm", "head"], ["layers.1.w", "layers.2.w"]], None),
        ([["embed", "layers.0.w", "layers.1.w"], ["layers.2.w", "norm", "embed"]], None),  # tied to the head
        ([["embed"], ["layers.0.w", "layers.1.w"], ["norm", "embed"]], None),
        ([["embed", "layers.0.w", "layers.2.w"], ["layers.1.w", "layers.3.w", "norm", "embed"]], None),
        ([["layers.10.w"], ["layers.9.w"]], "layers.9.w layers.10.w"),
        ([["e.0.w", "e.1.w"], ["e.2.w", "d.0.w"], ["d.1.w"]], None),
        (
            [["layers.0.attention", "layers.0.experts.0", "layers.0.norm", "layers.1.attention"],
             ["layers.0.attention", "layers.0.experts.1", "layers.0.norm", "layers.1.attention"]],
            "layers.0.attention layers.0.experts.0 layers.0.experts.1 layers.0.norm layers.1.attention",
        ),
        ([[], ["a", "b"], ["a", "b"]], "a b"),
    ],
)  # fmt: skip
def test_the_names_of_stages_come_in_the_order_of_the_full_model(lists: list[list[str]], order: str | None) -> None:
    full = "embed layers.0.w layers.1.w layers.2.w layers.3.w e.0.w e.1.w e.2.w d.0.w d.1.w norm head".split()
    names = {name for each in lists for name in each}
    assert merged(lists) == (order.split() if order else [name for name in full if name in names])


def test_opposite_orders_are_refused_and_order_decides() -> None:
    one, other = ({name: FULL[name] for name in names} for names in (("embed.w", "head.w"), ("head.w", "embed.w")))
    assert refused(held(one), held(other)).startswith(
        "the ranks have parameter 'embed.w' and parameter 'head.w' in opposite orders: give all ranks "
        "dips.Parallel(order=...)"
    )
    first, _ = whole(held(one), held(other), order=["frozen", "head.w", "embed.w"])
    assert [parameter.name for parameter in first.layout.parameters] == ["head.w", "embed.w"]
    assert "dips.Parallel(order=...) lacks 'embed.w'" in refused(held(one), held(other), order=["head.w"])


def part(start: int, values: torch.Tensor) -> Held:
    return held({"w": values}, shards={"w": ShardOf("w", (10,), (start,))})


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ((held(FULL), ValueError("no")), None),
        ((held(FULL), None),
         "rank 1 of this cluster has no master, and rank 0 has one: set DIPS_MASTER on every rank (torchrun"),
        ((held({"v": torch.ones(2), "w": torch.ones(3)}), held({"v": torch.ones(2), "w": torch.ones(4)})),
         "parameter 'w' is float32 of shape [4] on rank 1, and float32 of shape [3] on rank 0: one name is one"),
        ((held({"w": torch.ones(3)}), held({"w": torch.ones(3, dtype=torch.bfloat16)})),
         "parameter 'w' is bfloat16 of shape [3] on rank 1, and float32 of shape [3] on rank 0: "),
        ((held({"w": torch.ones(3)}), held({"w": torch.zeros(3)})),
         "parameter 'w' has other values on rank 1 than on rank 0: one name is one tensor in the whole cluster; "),
        ((part(0, torch.ones(4)), part(5, torch.ones(5))),
         "no rank holds 1 of the 10 elements of parameter 'w' of shape [10]: "),
        ((part(0, torch.ones(6)), part(5, torch.zeros(5))),
         "parameter 'w' has other values on rank 1 than on rank 0: "),
    ],
)  # fmt: skip
def test_what_cannot_be_one_model_is_refused_with_one_sentence(
    ranks: tuple[Held | Exception | None, ...], sentence: str | None
) -> None:
    if sentence is None:
        assert agreed(*ranks) == ["rank 1 of this cluster cannot take part: no", "no"]
    else:
        assert refused(*ranks).startswith(sentence)


def test_a_setting_that_differs_is_named_with_both_values() -> None:
    settings = [{"sync_every": 4, "run_id": "r"}, {"sync_every": 5, "run_id": "r"}]
    assert refused(held(FULL), held(FULL), settings=settings) == (
        "rank 1 has sync_every=5 and rank 0 has sync_every=4: give all ranks of a cluster the same"
    )


def test_no_rank_has_a_master() -> None:
    assert agreed(None, None) == [None, None]


def test_replicas_of_the_whole_model_hold_the_same_names() -> None:
    some = {name: FULL[name] for name in ("embed.w", "layers.0.w")}
    assert refused(held(FULL), held(some), replicas=True).startswith("only rank 0 has parameter 'head.w': ")
    other = {"embed.w": FULL["embed.w"], "layers.0.bias": FULL["layers.0.w"], "head.w": FULL["head.w"]}
    assert refused(held(FULL), held(other), replicas=True).startswith(
        "rank 1 has parameter 'layers.0.bias' where rank 0 has 'layers.0.w': under DistributedDataParallel"
    )


def test_marks_of_megatron_are_heeded_though_the_values_are_equal() -> None:
    ranks = [held({"w": torch.ones(4)}), held({"w": torch.ones(4)})]
    for each in ranks:
        each.models[0].get_parameter("w").tensor_model_parallel = True  # type: ignore[attr-defined]
    marked = [held_here(each.models, [torch.optim.SGD(each.models[0].parameters(), lr=0.1)]) for each in ranks]
    assert refused(*marked).startswith("parameter 'w' is marked as tensor_model_parallel, and ranks [0, 1] hold it as")
    assert len(whole(*marked, replicas=True)) == 2
    marked[0].is_replica = True  # under DistributedDataParallel, and rank 1 is not
    assert "is marked as tensor_model_parallel" in refused(*marked)


def with_mesh(mesh: tuple[int, ...], values: torch.Tensor) -> Held:

    class OnMesh(Held):
        @property
        def rows(self) -> list[Row]:
            return [replace(row, mesh=mesh) for row in super().rows]

    made = held({"w": values})
    made.__class__ = OnMesh
    return made


def test_a_shard_of_another_mesh_is_refused() -> None:
    said = refused(with_mesh((0, 1), torch.ones(2)), with_mesh((), torch.ones(2)))
    assert said.startswith(
        "parameter 'w' is cut over ranks [0, 1] on rank 0, and rank 1 has it as a plain tensor: cut it over the same "
        "mesh on all ranks of that mesh"
    )
    said = refused(with_mesh((0, 7), torch.ones(2)), with_mesh((0, 7), torch.ones(2)))
    assert "and rank 7 is none of this cluster's 2" in said


@pytest.mark.parametrize(
    ("tensors", "shards", "sentence"),
    [
        ({"w": torch.ones(4)}, {"x": ShardOf("w")}, "shards has 'x', which no module of this rank has: "),
        ({"w": torch.ones(4)}, {"w": ShardOf("w", (8,))}, "shards gives 'w' only one of shape and starts: "),
        ({"w": torch.ones(4)}, {"w": ShardOf("w", (8,), (5,))}, "shards says that 'w' of shape [4] begins at [5] of"),
        ({"w": torch.ones(4)}, {"w": ShardOf("w", (4, 2), (0, 0))}, "shards says that 'w' of 1 dimensions begins at"),
        ({"v": torch.ones(4), "w": torch.ones(4)}, {"w": ShardOf("v")}, "two tensors of this rank are called 'v': "),
    ],
)
def test_a_mapping_that_cannot_be_is_refused(tensors: dict[str, torch.Tensor], shards: Shards, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        held(tensors, shards=shards)
    assert str(caught.value).startswith(sentence)


def test_several_modules_of_a_rank_and_their_mappings() -> None:
    stages = [module({"0.w": torch.full((2,), float(i)), "base": torch.ones(i + 1)}) for i in range(2)]
    for stage in stages:
        stage.get_parameter("base").requires_grad = False
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1) for stage in stages]
    with pytest.raises(ConfigError, match=r"two tensors of this rank are called '0\.w'"):
        held_here(stages, optimizers)
    shards = [{"0.w": ShardOf(f"layers.{i}.w"), "base": ShardOf(f"layers.{i}.base")} for i in range(2)]
    here = held_here(stages, optimizers, shards=shards)
    assert [(each.number, each.name, each.shape) for each in here.untrained] == [
        (0, "layers.0.base", (1,)), (1, "layers.1.base", (2,)),
    ]  # fmt: skip
    (alone,) = whole(here)
    assert [p.name for p in alone.layout.parameters] == ["layers.0.w", "layers.1.w"]
    with pytest.raises(ConfigError, match="shards has 1 mappings for 2 modules"):
        held_here(stages, optimizers, shards=[{}])
    optimizers[1].__class__ = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    with pytest.raises(ConfigError, match="ZeroRedundancyOptimizer cuts"):
        held_here(stages, optimizers, shards=shards)


def test_muon_steps_no_part_of_a_matrix_in_a_plain_tensor() -> None:
    """It would orthogonalise the part as if it were whole."""
    made = module({"w": torch.ones(2, 4), "v": torch.ones(2, 2)})
    part = {"w": ShardOf("w", shape=(4, 4), starts=(2, 0))}
    of_v, of_w = (torch.optim.Muon([made.get_parameter(name)]) for name in "vw")
    with pytest.raises(ConfigError, match=r"Muon steps 'w', of which this rank holds a part .* or let AdamW step it"):
        held_here([made], [of_v, of_w], shards=part)
    adamw = torch.optim.AdamW([made.get_parameter("w")])
    assert [row.box.sizes for row in held_here([made], [of_v, adamw], shards=part).rows] == [(2, 4), (2, 2)]


def test_a_master_copy_is_pushed_in_place_of_its_parameter() -> None:
    made = module({"w": torch.ones(3, dtype=torch.bfloat16), "v": torch.ones(2)})
    copy = torch.full((3,), 1.00001)
    optimizer = torch.optim.SGD([copy], lr=0.1)
    (alone,) = whole(held_here([made], [optimizer], master_parameters={"w": copy}))
    assert [(p.name, p.dtype) for p in alone.layout.parameters] == [("w", "float32"), ("v", "float32")]
    assert alone.tensors()[0].data_ptr() == copy.data_ptr()
    first, second = alone.working_copies()
    assert first is not None
    assert first.data_ptr() == made.get_parameter("w").data_ptr()
    assert second is None
    for wrong in (copy.double(), copy[:2]):
        with pytest.raises(ConfigError, match="the master copy of 'w' is"):
            held_here([made], [optimizer], master_parameters={"w": wrong})
    with pytest.raises(ConfigError, match="master_parameters has 'x', which this rank does not train"):
        held_here([made], [optimizer], master_parameters={"x": copy})


def test_averaged_buffers_come_last_and_are_found_again() -> None:
    ranks = []
    for _ in range(2):
        made = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
        for parameter in made[1].parameters():
            torch.nn.init.ones_(parameter)
        ranks.append(held_here([made], [torch.optim.SGD(made.parameters(), lr=0.1)], buffers="average"))
    with torch.no_grad():
        ranks[1].models[0].get_buffer("0.running_mean").add_(1.0)
    first, _ = whole(*ranks)
    assert [p.name for p in first.layout.parameters if p.averaged] == ["0.running_mean", "0.running_var"]
    one = first.mine.models[0]
    alone = TorchParameters(one, torch.optim.SGD(one.parameters(), lr=0.1), buffers="average")
    assert first.layout.layout_hash == alone.layout().layout_hash
    norm = one.get_submodule("0")
    norm.running_mean = torch.full((2,), 7.0)
    assert first.tensors()[-2].tolist() == [7.0, 7.0]
    norm.running_mean = torch.full((3,), 7.0)
    with pytest.raises(ConfigError, match=r"buffer '0\.running_mean' has another shape"):
        first.tensors()


def test_a_parameter_that_is_new_since_and_another_models_optimizer_are_refused() -> None:
    (alone,) = whole(held(FULL))
    alone.mine.models[0].register_parameter("more", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigError, match="parameter 'more' was not trained, or was another tensor, when the loop"):
        alone.tensors()
    with pytest.raises(ConfigError, match="the optimizer holds none of the model's parameters"):
        held_here([module(FULL)], [torch.optim.SGD(module(FULL).parameters(), lr=0.1)])


def on_data(of: Held, data: DataPlace | None = None, fsdp: DataPlace | None = None) -> Held:
    of.data, of.fsdp = data, fsdp
    return of


def test_the_users_mesh_goes_before_fsdps_and_that_before_the_pieces() -> None:
    both = [on_data(held(FULL), DataPlace(0, 1), DataPlace(rank, 2)) for rank in range(2)]
    assert whole(*both)[0].coordinates == (0, 0)
    assert whole(*(on_data(each, None, each.fsdp) for each in both))[1].coordinates == (0, 1)


def test_ranks_with_equal_pieces_train_on_different_data_and_others_share_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    stages = [{"layers.0.w": torch.ones(2)}, {"layers.1.w": torch.ones(2)}]
    four = whole(*(held(stages[rank // 2]) for rank in range(4)))
    assert four[0].coordinates == (0, 1, 0, 1)
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["tokens and loss count for 2 of the 4 ranks"]


def test_ranks_that_disagree_on_their_data_are_refused() -> None:
    said = refused(on_data(held(FULL), DataPlace(0, 2)), on_data(held(FULL)))
    assert said.startswith("rank 1 trains on data of no mesh, and rank 0 on data dealt to 2 ranks: give all ranks ")
    assert "dips.Parallel(data_mesh=...)" in said


def replicas_of(
    *values: torch.Tensor, are_replicas: bool = False
) -> tuple[RankTable, list[Replicas], list[torch.nn.Module]]:
    held_ = [held({"w": each, "norm.w": torch.ones(8)}) for each in values]
    table = RankTable(len(values))
    said = table.together(lambda seat: agree(seat, held_[seat.rank], {}, replicas=are_replicas))
    made = [Replicas(seat, a) for seat, a in zip(table.seats, said, strict=True) if isinstance(a, Agreed)]
    assert len(made) == len(values), said
    return table, made, [each.models[0] for each in held_]


LARGE = torch.randn(100 * SAMPLE_STRIDE, generator=torch.Generator().manual_seed(0))


def test_equal_values_need_one_message_and_elements_of_one_rank_none() -> None:
    table, replicas, _ = replicas_of(LARGE, LARGE, LARGE)
    before = table.n_gathers
    assert table.together(lambda seat: replicas[seat.rank].agree(replicas=False)) == [False] * 3
    assert table.n_gathers == before + 1
    stages = RankTable(2)
    said = stages.together(lambda seat: agree(seat, held({f"layers.{seat.rank}.w": LARGE}), {}))
    alone = [Replicas(seat, a) for seat, a in zip(stages.seats, said, strict=True) if isinstance(a, Agreed)]
    for each in alone:
        each.compare()
    assert stages.n_gathers == 1


def test_replicas_that_differ_get_rank_0s_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    table, replicas, _ = replicas_of(LARGE, LARGE + 1, are_replicas=True)
    assert table.together(lambda seat: replicas[seat.rank].agree(replicas=True)) == [True, True]
    assert [record.getMessage() for record in caplog.records] == [
        "parameter 'w' has other values on rank 1 than on rank 0: these ranks are replicas, and get rank 0's parameters"
    ]


def test_one_element_that_differs_is_found_at_once_and_later_within_the_turns_of_the_sample() -> None:
    table, replicas, models = replicas_of(LARGE, LARGE)

    def compare(seat: Seat) -> None:
        replicas[seat.rank].compare()

    with torch.no_grad():
        models[1].get_parameter("w")[70] += 1
    first = table.together(compare)
    assert first[0] == first[1]
    assert str(first[0]).startswith("parameter 'w' of rank 1 is no longer equal to rank 0's, and is not pushed: ")
    turns = [table.together(compare) != [None, None] for _ in range(SAMPLE_STRIDE)]
    assert turns.index(True) + 1 == 70 % SAMPLE_STRIDE
    assert sum(turns) == 1
    table, replicas, models = replicas_of(LARGE, LARGE, LARGE)
    with torch.no_grad():
        models[2].get_parameter("norm.w")[7] += 1
    assert str(table.together(compare)[1]).startswith("parameter 'norm.w' of rank 2 is no longer equal to rank 0's")


def agreed_and_given(table: RankTable, replicas: list[Replicas]) -> list[bool | str]:
    differ = table.together(lambda seat: replicas[seat.rank].agree(replicas=True))
    table.together(lambda seat: replicas[seat.rank].give(seat.copy))
    return differ


def test_values_are_compared_and_given_in_logical_order_whatever_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.worker.parallel.replicas.GROUP_ELEMS", 5)
    rows = torch.arange(48.0).view(4, 4, 3)
    for turned, differ in (
        (rows.permute(2, 1, 0).contiguous().permute(2, 1, 0), False),
        (rows.mT.contiguous().mT, True),
    ):
        if differ:
            turned[3, 2, 1] = -1.0
        table, replicas, models = replicas_of(rows, turned, are_replicas=True)
        assert not models[1].get_parameter("w").is_contiguous()
        assert agreed_and_given(table, replicas) == [differ] * 2
        assert torch.equal(models[1].get_parameter("w"), rows)


def test_a_rank_that_cannot_read_its_parameters_ends_all() -> None:
    table, replicas, models = replicas_of(LARGE, LARGE)
    models[1].register_parameter("more", torch.nn.Parameter(torch.ones(1)))
    first, second = table.together(lambda seat: replicas[seat.rank].compare())
    assert str(second).startswith("parameter 'more' was not trained")
    assert first == f"rank 1 of this cluster cannot take part: {second}"


def test_the_lowest_holders_values_reach_the_others_and_their_working_copies() -> None:
    """Ranks 0 and 1 hold all, rank 2 the last four elements, with other values."""
    full = [torch.full((7,), float(rank)) for rank in range(3)]
    masters = [each.clone() for each in full]
    ranks = []
    for rank, shards in enumerate((None, None, {"w": ShardOf("w", (7,), (3,))})):
        values = full[rank][3:] if shards else full[rank]
        masters[rank] = masters[rank][3:] if shards else masters[rank]
        other = torch.full((2,), float(rank))
        made = module({"w": values.bfloat16(), "v": other.bfloat16()})
        optimizer = torch.optim.SGD([masters[rank]], lr=0.1)
        ranks.append(
            held_here([made], [optimizer], shards=shards, master_parameters={"w": masters[rank], "v": other})
        )  # fmt: skip
    table = RankTable(3)

    def give(seat: Seat) -> bool:
        mine = agree(seat, ranks[seat.rank], {}, replicas=True)
        assert mine is not None
        replicas = Replicas(seat, mine)
        differ = replicas.agree(replicas=True)
        replicas.give(seat.copy)
        return differ

    assert table.together(give) == [True] * 3
    for rank, each in enumerate(ranks):
        assert not masters[rank].any()
        assert not any(each.models[0].get_parameter(name).any() for name in "wv")
