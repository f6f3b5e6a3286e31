"""`python run_job.py TARGET RANKS TIMEOUT_S FOLDER`: launches a job as `engines train` does, without torch."""

from __future__ import annotations

import sys

from engines.errors import EnginesError
from engines.launch import Job, launch


def main() -> int:
    """Exit code of the job; 2 and the message for what the user must mend."""
    target, num_ranks, timeout_s, folder = sys.argv[1:]
    try:
        code = launch(Job(target, {"folder": folder}, int(num_ranks), float(timeout_s)))
    except EnginesError as error:
        print(f"MEND {error}", file=sys.stderr)
        code = 2
    assert "torch" not in sys.modules, "the launcher imports no torch"
    return code


if __name__ == "__main__":
    sys.exit(main())
