"""The scorecard's tests. Importing a module registers its tests; a new one is added below."""

from vua.testing.card import damage, kills, syscalls

__all__ = ["damage", "kills", "syscalls"]
