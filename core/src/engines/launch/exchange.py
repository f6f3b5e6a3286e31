"""The temporary folder through which a launcher and its ranks talk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Exchange:
    """File names in that folder."""

    folder: Path

    @property
    def job(self) -> Path:
        """What to run; the launcher writes it."""
        return self.folder / "job.json"

    @property
    def rendezvous(self) -> str:
        """URL at which torch.distributed's ranks meet: a file, since a port free now may be taken later."""
        return f"file://{self.folder}/rendezvous"

    def heartbeat(self, rank: int) -> Path:
        """A rank's signs of life."""
        return self.folder / f"heartbeat-{rank}"

    def report(self, rank: int) -> Path:
        """What ended a rank, in its own words."""
        return self.folder / f"report-{rank}.json"

    def output(self, rank: int) -> Path:
        """What a rank other than the first wrote to its standard output and error."""
        return self.folder / f"output-{rank}"
