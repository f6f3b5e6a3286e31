"""Micro-batch records become numbers that are equal on all ranks."""

from __future__ import annotations

import torch.distributed as dist

from engines.contract import MicroResult, Ranks
from engines.engine.collectives import gather_rows, share_row


def reduce_results(
    results: list[MicroResult] | None, terms: list[str], ranks: Ranks
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums of loss `terms` over micro-batches and data-parallel ranks, and means of engine metrics.

    All ranks call it; `results` is None where a rank holds no outputs. Ranks may hold different engine metrics
    (one that only ran fillers has none), so their names are agreed on first, if any rank has some.
    """
    row = None
    names: list[str] = []
    if results is not None:
        sums = {name: sum(float(r.terms[name]) for r in results if name in r.terms) for name in terms}
        local = _totals(results)
        mine = [*(sums[name] for name in terms), float(len(local))]
        totals: list[float] = gather_rows(mine, ranks.dp_group).sum(0).tolist()
        row = totals[:-1]
        if totals[-1]:
            means = _agreed_means(local, ranks)
            names, row = list(means), [*row, *means.values()]
    names = _share_names(names, results is not None, ranks)
    shared = share_row(row, len(terms) + len(names), ranks)
    return dict(zip(terms, shared, strict=False)), dict(zip(names, shared[len(terms) :], strict=True))


def _totals(results: list[MicroResult]) -> dict[str, tuple[float, int]]:
    totals: dict[str, tuple[float, int]] = {}
    for result in results:
        for name, value in result.metrics.items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = (total + float(value), count + 1)
    return totals


def _agreed_means(local: dict[str, tuple[float, int]], ranks: Ranks) -> dict[str, float]:
    everyone: list[dict[str, tuple[float, int]]] = [local]
    if ranks.dp_group is not None:
        gathered: list[dict[str, tuple[float, int]] | None] = [None] * ranks.dp_size
        dist.all_gather_object(gathered, local, group=ranks.dp_group)
        everyone = [totals for totals in gathered if totals is not None]
    means = {}
    for name in sorted({name for totals in everyone for name in totals}):
        pairs = [totals[name] for totals in everyone if name in totals]
        means[name] = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    return means


def _share_names(names: list[str], holds_outputs: bool, ranks: Ranks) -> list[str]:
    """The output rank's metric names inside the replica; one small broadcast, only where a replica has ranks."""
    if ranks.replica_group is None:
        return names
    box = [names if holds_outputs else None]
    dist.broadcast_object_list(box, src=ranks.output_rank, group=ranks.replica_group)
    return box[0] or []
