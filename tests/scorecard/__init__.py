"""The scorecard: numbered tests of a cache under damage, faults, crowds and attacks.

They see a cache through one small class (:class:`scorecard.subject.Subject`), so VUA, a storage of
your own and other caches can all be tested. :mod:`scorecard.card` holds the tests, and
:mod:`scorecard.faults` what breaks things for them. `dev.py scorecard` runs it.
"""
