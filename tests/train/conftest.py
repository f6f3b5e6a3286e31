"""A tiny model and data, made once."""

from support.work_folder import model, work

__all__ = ["model", "work"]
