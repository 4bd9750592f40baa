"""Fault campaigns: what may happen to a cache from outside, over and over, and what must hold then.

Each module is one kind of fault. All look at the same :class:`scorecard.faults.world.World`,
whose every byte follows from the names of its chunks, so that what a reader gets back can be judged
without knowing who wrote it, or whether he lived to tell.
"""
