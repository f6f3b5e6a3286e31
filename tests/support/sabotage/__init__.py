"""Engines that break the contract, in one way each, and what of the kit must catch them."""

from __future__ import annotations

from support.sabotage.table import SABOTAGES, SOUND, Sabotage, register

__all__ = ["SABOTAGES", "SOUND", "Sabotage", "register"]
