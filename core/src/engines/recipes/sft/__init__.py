"""Supervised fine-tuning: `recipe: sft`."""
