"""What VUA has in C: eight things, all but the second with a fallback in Python that does the same.

=================== ======================== =====================================================
:func:`read_entries` ``load.c``, ``direct.c`` reads and hashes a batch of entry files by one call
:class:`EntryStream` ``load.c``, ``direct.c`` the same ahead of use; without it batches are read
:func:`write_entries` ``save.c``             hashes and writes a batch
:func:`fill_entry`   ``rows.c``              takes an entry from memory instead, as buckets have it
:func:`gather_entry` ``rows.c``              the reverse
:func:`hash_chain`   ``chain.c``             hashes the chunks of a prompt
:func:`list_chunks`  ``list.c``              the chunks in a directory, and their mtimes
:func:`copy_strided` ``move.c``              copies between chunks and an engine's pages
=================== ======================== =====================================================

Each decides by itself whether the library does the work or :mod:`vua.native.fallback`; nobody else
asks. docs/decisions/0006-native-loops.md says why, and what it brings, and
docs/decisions/0023-batches-of-entries.md how what they read is judged.

They are one shared library without anything of Python's, `_vua_native.linux-MACHINE.so` in this
folder, which `hatch_build.py` compiles when a wheel is built (`dev.py build`: in a checkout).
At run time nothing is compiled; docs/decisions/0020-native-with-the-wheel.md says what is checked
then. The environment variable ``VUA_NATIVE`` says whether the library is used: ``auto`` (the
default), ``off``, or ``require`` (fail without it). :func:`status` says whether it is.
"""

from vua.native.bindings import Status, library, status
from vua.native.entries import (
    FAILED,
    ITEMS,
    PRESENT,
    THREADS,
    WRITTEN,
    EntryStream,
    StridedCopy,
    WriteOptions,
    copy_strided,
    crew,
    fill_entry,
    gather_entry,
    list_chunks,
    read_entries,
    write_entries,
)
from vua.native.fallback import LATEST_NS, read_entry
from vua.native.hashes import Digest, digests_of, fill_check, hash_chain, narrow
from vua.native.rows import blocks_of, rows_of
from vua.native.transfer import NOWHERE, Headers, Spread, Transfer

__all__ = [
    "FAILED",
    "ITEMS",
    "LATEST_NS",
    "NOWHERE",
    "PRESENT",
    "THREADS",
    "WRITTEN",
    "Digest",
    "EntryStream",
    "Headers",
    "Spread",
    "Status",
    "StridedCopy",
    "Transfer",
    "WriteOptions",
    "blocks_of",
    "copy_strided",
    "crew",
    "digests_of",
    "fill_check",
    "fill_entry",
    "gather_entry",
    "hash_chain",
    "library",
    "list_chunks",
    "narrow",
    "read_entries",
    "read_entry",
    "rows_of",
    "status",
    "write_entries",
]
