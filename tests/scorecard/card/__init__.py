"""The scorecard's tests. Importing a module registers its tests; a new one is added below."""

from scorecard.card import (
    clocks,
    costs,
    crowd,
    damage,
    engine,
    failing,
    hangs,
    hostile,
    kills,
    limits,
    names,
    owners,
    power,
    privacy,
    syscalls,
)

__all__ = [
    "clocks",
    "costs",
    "crowd",
    "damage",
    "engine",
    "failing",
    "hangs",
    "hostile",
    "kills",
    "limits",
    "names",
    "owners",
    "power",
    "privacy",
    "syscalls",
]
