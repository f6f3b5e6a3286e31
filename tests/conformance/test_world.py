"""What a world says of ranks that don't answer."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from engines.testing.world import World, WorldError


def wait_for_the_other() -> None:
    """Rank 0 enters a collective that rank 1 never does."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(60)


@pytest.mark.more
def test_silent_ranks_are_found_where_they_stand() -> None:
    world = World(2)
    world(dist.get_rank)
    with pytest.raises(WorldError) as error:
        world(wait_for_the_other, timeout=2)
    said = str(error.value)
    assert "ranks [0, 1] of 2 did not answer within 2 s" in said
    assert "in wait_for_the_other, which waits in all_reduce" in said
