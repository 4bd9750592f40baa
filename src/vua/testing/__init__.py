"""Helpers for tests of code that uses VUA; installed with it, and not imported by it.

The contract of a storage as a suite of tests (:mod:`vua.testing.conformance`), and a storage that
fails on command (:mod:`vua.testing.faulty`).
"""
