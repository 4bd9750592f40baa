"""Keeps a cache within its limits: what was used last, how much is stored, what goes first."""
