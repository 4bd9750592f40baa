"""A few loops in C, where the installation has them; everything works without them.

`load.c` reads and hashes a batch of files in one call: one release of the GIL for all of them, and
a second core where that pays; `direct.c` does so past the page cache. `save.c` hashes and writes a
batch of files. :mod:`vua.native.fallback` does the same file by file, is always there, and is the
one that judges whatever `load.c` does not find in order. `chain.c` hashes the chunks of a
prompt, `move.c` copies between chunks and an engine's pages.
docs/decisions/0006-native-loops.md says why, and what it brings.

They are one shared library without anything of Python's, `_vua_native.linux-MACHINE.so` in this
folder, which `hatch_build.py` compiles when a wheel is built (`dev.py build`: in a checkout).
At run time nothing is compiled; docs/decisions/0020-native-with-the-wheel.md says what is checked
then. The environment variable ``VUA_NATIVE`` says whether the library is used: ``auto`` (the
default), ``off``, or ``require`` (fail without it). :func:`status` says whether it is.
"""

from vua.native.batches import THREADS, hash_entry, read_entries
from vua.native.bindings import Status, library, status
from vua.native.fallback import read_entry
from vua.native.moves import ITEMS, Boxes, move
from vua.native.prefixes import chain, narrow
from vua.native.saves import FAILED, PRESENT, WRITTEN, WriteOptions, write_entries
from vua.native.transfer import Digest, Headers, Transfer, digests_of, fill_check

__all__ = [
    "FAILED",
    "ITEMS",
    "PRESENT",
    "THREADS",
    "WRITTEN",
    "Boxes",
    "Digest",
    "Headers",
    "Status",
    "Transfer",
    "WriteOptions",
    "chain",
    "digests_of",
    "fill_check",
    "hash_entry",
    "library",
    "move",
    "narrow",
    "read_entries",
    "read_entry",
    "status",
    "write_entries",
]
