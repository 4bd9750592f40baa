"""Keeps a cache within its limits: what was used last, how much is there, what goes first."""
