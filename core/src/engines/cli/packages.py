"""What commands need beyond what core itself is installed with."""

from __future__ import annotations

from engines.errors import ConfigError
from engines.requirements import unmet


def check_packages(doing: str) -> None:
    """Raise `ConfigError` where core was installed without what training, and the files of runs, need."""
    missing = unmet("engines-core", "train")
    if missing:
        raise ConfigError(
            f"{doing} needs {', and '.join(map(str, missing))}",
            "pip install 'engines-core[train]'; the distribution of any engine brings them too",
        )
