"""Data for supervised fine-tuning: files of records, turned into tokens and a mask of those to learn.

A record, a line of JSONL or a row of Parquet, has exactly one of these sets of fields:

* `messages`: a conversation, `[{"role": ..., "content": ...}, ...]`, rendered with the tokenizer's chat template.
  Learned are the assistant's turns, from after their header to the end-of-turn token.
* `prompt` and `response`: tokenised apart, as they are when a model answers; an end-of-sequence token follows.
  Learned are the response and the end.
* `text`: an end-of-sequence token follows; everything is learned.
* `input_ids`, optionally `loss_mask` (0 or 1 each; absent: all 1). No tokenizer is needed.

The first token of a sample can't be predicted and is never learned.
"""

from __future__ import annotations

from engines.recipes.data.order import SampleOrder
from engines.recipes.data.samples import Limits, Samples, read_samples, scan

__all__ = ["Limits", "SampleOrder", "Samples", "read_samples", "scan"]
