"""The scorecard's tests. Importing a module registers its tests; a new one is added below."""

from vua.testing.card import costs, crowd, damage, engine, failing, hostile, names, privacy

__all__ = ["costs", "crowd", "damage", "engine", "failing", "hostile", "names", "privacy"]
