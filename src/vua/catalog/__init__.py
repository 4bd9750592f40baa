"""Caches as operators see them, in a directory, a bucket or any other storage: see `base`."""
