"""Helpers for tests of code that uses VUA; installed with it, and not imported by it.

Storages that fail (:mod:`vua.testing.faulty`) or are slow (:mod:`vua.testing.throttle`), small
models with random weights (:mod:`vua.testing.models`) and a small trained one
(:mod:`vua.testing.real_model`). Each module says what it requires.
"""
