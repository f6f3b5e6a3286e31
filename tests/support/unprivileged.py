"""`python unprivileged.py COMMAND ...`: the command, to which permissions apply even if root runs it (Linux)."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

_PR_CAPBSET_DROP: Final = 24
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


def main() -> None:
    """Give up root's rights to override permissions, and become the command."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
            if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl(PR_CAPBSET_DROP)")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
