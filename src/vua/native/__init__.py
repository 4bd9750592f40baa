"""A few loops in C, where the machine has a C compiler; everything works without them.

`load.c` reads and hashes a batch of files in one call: one release of the GIL for all of them, and
a second core where that pays; `direct.c` does so past the page cache. `save.c` hashes and writes a
batch. The Python path of :mod:`vua.store` does the same file by file, is always there, and
is the one that judges whatever `load.c` does not find in order. `chain.c` hashes the chunks of a
prompt, `move.c` copies between chunks and an engine's pages.
docs/decisions/0006-native-loops.md says why, and what it brings.

The library is compiled on first use, in the background, into ``$XDG_CACHE_HOME/vua`` (or
``~/.cache/vua``) under a name made of its sources' digest. The environment variable ``VUA_NATIVE``
says whether: ``auto`` (the default), ``off``, or ``require`` (wait for it, fail without it).
"""

from vua.native.batches import ARRAYS_MAX, THREADS, Batch, Recipe, checksums, load
from vua.native.build import library
from vua.native.moves import ITEMS, Boxes, move
from vua.native.prefixes import chain, narrow
from vua.native.saves import LEFT, PRESENT, WRITTEN, Writing, save

__all__ = [
    "ARRAYS_MAX",
    "ITEMS",
    "LEFT",
    "PRESENT",
    "THREADS",
    "WRITTEN",
    "Batch",
    "Boxes",
    "Recipe",
    "Writing",
    "chain",
    "checksums",
    "library",
    "load",
    "move",
    "narrow",
    "save",
]
