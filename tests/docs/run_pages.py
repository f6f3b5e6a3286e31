"""Runs the Python of documentation pages, each page in a namespace of its own; a script, told what to run by JSON.

Input: {page: {"before": code, "blocks": [code, ...]}}. Output: {page: the traceback, or null}. The working folder
gets a tiny model at `model`, and what a run of it leaves at `run`.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from engines import TrainingWorker
from engines.testing.tiny import tiny_folder


def main(pages: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    tiny_folder(Path(), "qwen3").rename("model")
    with TrainingWorker({"path": "model"}, {"strategy": "fsdp2"}, {"lr": 1e-4}) as worker:
        worker.initialize()
        worker.save_checkpoint("run/checkpoints/step-20", step=20)
    return {page: run(page, [code["before"], *code["blocks"]]) for page, code in pages.items()}


def run(page: str, blocks: list[str]) -> str | None:
    """What went wrong, if anything did."""
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for number, code in enumerate(blocks):
            exec(compile(code, f"{page}, block {number}", "exec"), names)
    except Exception:  # noqa: BLE001 (it is reported as it is)
        return traceback.format_exc()
    finally:
        for value in names.values():
            if isinstance(value, TrainingWorker):
                value.close()
    return None


if __name__ == "__main__":
    found = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
