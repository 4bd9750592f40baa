"""Caches as operators see them, wherever they are: see `base`."""
