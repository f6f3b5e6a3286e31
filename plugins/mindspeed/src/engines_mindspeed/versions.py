"""Which MindSpeed patches which Megatron-Core: the table that the guard holds what would be imported to.

The manifest repeats the ranges, so that `engines why` and `engines doctor` need not run this.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Pair:
    """A branch of MindSpeed and what it goes with."""

    branch: str
    mindspeed: SpecifierSet
    """Of the distribution that the branch installs. Its branches for 0.17 and 0.18 call themselves 0.12.1."""
    megatron_core: SpecifierSet
    torch: str
    """What MindSpeed's README states; this project runs others, so it is said and not refused."""

    def __str__(self) -> str:
        return f"MindSpeed {self.mindspeed} (branch {self.branch}) with megatron-core {self.megatron_core}"


PAIRS = (Pair("core_r0.16.0", SpecifierSet("==0.16.*"), SpecifierSet(">=0.16.1,<0.17"), "2.7.1"),)


def pair(mindspeed: str, megatron_core: str) -> Pair | None:
    """The row that these two versions are in."""
    for one in PAIRS:
        if one.mindspeed.contains(mindspeed, prereleases=True) and one.megatron_core.contains(megatron_core):
            return one
    return None
