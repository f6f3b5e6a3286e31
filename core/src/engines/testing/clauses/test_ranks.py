"""Every rank knows its place before anything is built, and what is built is what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import engines
from engines.config import PARALLEL_SIZES, REPLICA_SIZES
from engines.engine.collectives import group_device
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import Layout
from engines.testing.subject import Subject

Group = list[int]
"""Global ranks, in the order of their ranks in it."""


@dataclass(frozen=True)
class Place:
    """What a rank says of itself."""

    dp_rank: int
    dp_size: int
    dp_group: Group
    replica: Group
    output_rank: int
    is_output: bool
    sums: tuple[int, int]
    """Of all ranks, reduced in both groups."""


@dataclass(frozen=True)
class Built:
    """An engine on a rank."""

    place: Place
    """Right after construction."""
    keeps_its_ranks: bool
    """Whether `ranks` are the same after `initialize`."""
    described: dict[str, Any]


def build(folder: Path, settings: dict[str, Any]) -> Built:
    with engines.create({"path": str(folder)}, settings) as engine:
        ranks = engine.ranks
        place = Place(
            ranks.dp_rank,
            ranks.dp_size,
            _members(ranks.dp_group),
            _members(ranks.replica_group),
            ranks.output_rank,
            ranks.is_output,
            (_sum_of_ranks(ranks.dp_group), _sum_of_ranks(ranks.replica_group)),
        )
        engine.initialize()
        return Built(place, engine.ranks == ranks, engine.describe())


def _members(group: ProcessGroup | None) -> Group:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def _sum_of_ranks(group: ProcessGroup | None) -> int:
    mine = torch.tensor(dist.get_rank(), device="cpu" if group is None else group_device(group))
    if group is not None:
        dist.all_reduce(mine, group=group)
    return int(mine)


Runs = Callable[[Layout], Sequence[Built]]


@pytest.fixture
def runs(subject: Subject, once_on_ranks: OnRanks, model: Model) -> Runs:
    """`runs(layout)`: each rank's."""
    return lambda layout: once_on_ranks(layout, build, model(subject.family_at(layout)), subject.settings(layout))


@clause("engines.contract:Ranks")
def test_shares_of_samples(layout: Layout, runs: Runs) -> None:
    """Right after construction a rank knows which share of the samples it works on: as many shares as there are
    replicas, `dp_group` one rank of each in the order of `dp_rank`, `replica_group` the ranks of mine; both groups
    work.
    """
    replica = prod(layout.settings.get(name, 1) for name in REPLICA_SIZES)
    shares = layout.processes // replica
    said = [one.place for one in runs(layout)]
    for rank, place in enumerate(said):
        assert place.dp_size == shares, f"rank {rank} counts {place.dp_size} data-parallel ranks, there are {shares}"
        mine = [other for other, one in enumerate(said) if one.dp_rank == place.dp_rank]
        assert len(mine) == replica, f"ranks {mine} have dp_rank {place.dp_rank}; a replica is {replica} ranks"
        assert sorted(place.replica) == mine, f"rank {rank} is in a replica of {place.replica}, not of {mine}"
        of_group = [said[other].dp_rank for other in place.dp_group]
        assert of_group == list(range(shares)), (
            f"rank {rank}'s dp_group is of the ranks {place.dp_group}, whose dp_ranks are {of_group}, not one after "
            f"another from 0 to {shares - 1}"
        )
        assert rank in place.dp_group, f"rank {rank} is not in its own dp_group {place.dp_group}"
        assert place.sums == (sum(place.dp_group), sum(mine)), f"rank {rank}'s groups reduced to {place.sums}"


@clause("engines.contract:Ranks")
def test_one_output_rank_per_replica(layout: Layout, runs: Runs) -> None:
    """Exactly one rank of each replica is its output rank, which all of the replica name; the output ranks of all
    replicas form a data-parallel group.
    """
    said = [one.place for one in runs(layout)]
    outputs = [rank for rank, place in enumerate(said) if place.is_output]
    for rank, place in enumerate(said):
        found = [other for other in place.replica if other in outputs]
        assert len(found) == 1, f"in the replica of the ranks {place.replica}, {len(found)} are output ranks: {found}"
        assert found == [place.output_rank], f"rank {rank} names {place.output_rank} as output rank; it is {found[0]}"
    assert sorted(said[outputs[0]].dp_group) == outputs, (
        f"the output ranks {outputs} must form a data-parallel group; that of {outputs[0]} is "
        f"{said[outputs[0]].dp_group}"
    )


@clause("engines.contract:BaseEngine.describe")
def test_what_is_built_is_what_was_asked_for(subject: Subject, layout: Layout, runs: Runs, model: Model) -> None:
    """`describe()` reads the layout from live groups and the model: every parallel size, under its name and as it was
    asked for. No parameter is missing, and a rank holds fewer than all of them where matrices, layers or experts are
    split.
    """
    asked = {name: layout.settings.get(name, 1) for name in PARALLEL_SIZES}
    asked["data_parallel_size"] = layout.processes // prod(asked[name] for name in REPLICA_SIZES)
    held = []
    for rank, found in enumerate(runs(layout)):
        built = found.described["layout"]
        off = {name: (built.get(name), size) for name, size in asked.items() if built.get(name) != size}
        assert not off, f"on rank {rank}, sizes that were built and asked for differ: {off}"
        assert found.keeps_its_ranks, f"rank {rank} has other `ranks` after `initialize` than before"
        held.append(found.described["parameters"])
    _check_parameters(held, _parameters_of(model(subject.family_at(layout))), asked)


def _check_parameters(held: Sequence[int], whole: int, asked: dict[str, int]) -> None:
    split = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size")
    copies = asked["data_parallel_replicate_size"]
    if len(held) == 1:
        assert held == [whole], f"the model has {whole} parameters, the one rank holds {held[0]}"
    assert sum(held) >= copies * whole, f"ranks hold {held} parameters; {copies} times {whole} are there to be held"
    if any(asked[name] > 1 for name in split):
        assert max(held) < whole, f"ranks hold {held} parameters: one holds all {whole}, so nothing is split"


def _parameters_of(folder: Path) -> int:
    """Elements of the parameters of the plain model, each once."""
    from transformers import AutoModelForCausalLM

    return sum(one.numel() for one in AutoModelForCausalLM.from_pretrained(folder).parameters())
