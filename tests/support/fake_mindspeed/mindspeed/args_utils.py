"""Arguments: defaults, what the command line says, what `repatch` gave."""

from __future__ import annotations

import argparse

_given: list[argparse.Namespace] = []


def get_mindspeed_args(get_defaults: bool = False) -> argparse.Namespace:
    """The process's arguments, or fresh defaults. Exits for a wrong command line, as argparse does."""
    if _given and not get_defaults:
        return _given[0]
    parser = argparse.ArgumentParser(description="The stand-in's arguments", allow_abbrev=False)
    parser.add_argument("--optimization-level", type=int, choices=[0, 1, 2], default=2)
    parser.add_argument("--sparse-mode", type=int, choices=[0, 2], default=0)
    parser.add_argument("--attention-mask-type", choices=["causal", "general"], default="causal")
    parser.add_argument("--context-parallel-algo", default="megatron_cp_algo")
    parser.add_argument("--use-fused-rotary-pos-emb", action="store_true")
    args, _ = parser.parse_known_args([] if get_defaults else None)
    if not get_defaults:
        _given.append(args)
    return args
