"""The scorecard's tests. Importing a module registers its tests; a new one is added below."""

from vua.testing.card import clocks, damage, hangs, kills, power, refusals, syscalls

__all__ = ["clocks", "damage", "hangs", "kills", "power", "refusals", "syscalls"]
