"""What a finished run has learned, and where its files are. Usage: python examples/summary.py OUTPUT_DIR"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean


def main(folder: Path) -> None:
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    few = min(5, len(losses))
    print(
        f"\nmean loss: {mean(losses[:few]):.2f} in the first {few} steps, {mean(losses[-few:]):.2f} in the last {few}"
    )
    print(f"loss curve   {folder / 'loss.png'}")
    print(f"checkpoint   {folder / 'checkpoints' / f'step-{len(losses)}'}")
    print(f"model        {folder / 'export'}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
