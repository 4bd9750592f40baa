"""What VUA has in C.

All but :class:`EntryStream` and `delete_chunks` have an equal fallback in Python.

===================== ======================== ===================================================
:func:`read_entries`  ``load.c``, ``direct.c`` reads and hashes a batch of entry files by one call
:class:`EntryStream`  ``load.c``, ``direct.c`` the same ahead of use, and compares headers
:func:`write_entries` ``save.c``               hashes and writes a batch
:func:`fill_entry`    ``rows.c``               takes an entry from memory, as buckets have it
:func:`gather_entry`  ``rows.c``               the reverse
:func:`hash_chain`    ``chain.c``              hashes the chunks of a prompt
:func:`list_chunks`   ``list.c``               lists a directory's chunks, and their mtimes
:func:`list_names`    ``list.c``               lists their names alone
:func:`chunk_sizes`   ``list.c``               adds up the bytes of each chunk's files
`delete_chunks`       ``list.c``               deletes chunks that hold nothing but entries
:func:`copy_strided`  ``move.c``               copies between chunks and an engine's pages
===================== ======================== ===================================================

Each function itself chooses between the library and :mod:`vua.native.fallback`; callers never ask.
docs/decisions/0006-native-loops.md gives the reasons and the gain;
docs/decisions/0023-batches-of-entries.md says how the bytes they read are judged.

They are one shared library that does not use Python, `_vua_native.linux-MACHINE.so` in this folder.
`hatch_build.py` compiles it when a wheel is built (in a checkout: `dev.py build`). Nothing is
compiled at run time; docs/decisions/0020-native-with-the-wheel.md says what is checked then. The
environment variable ``VUA_NATIVE`` decides whether the library is used: ``auto`` (the default),
``off``, or ``require`` (fail without it). :func:`status` reports the choice.
"""

from vua.native.bindings import Status, library, status
from vua.native.entries import (
    THREADS,
    ChunkNames,
    EntryStream,
    Places,
    StridedCopy,
    chunk_sizes,
    copy_strided,
    crew,
    fill_entry,
    gather_entry,
    list_chunks,
    list_names,
    read_entries,
    write_entries,
)
from vua.native.fallback import (
    LATEST_NS,
    Digest,
    digests_of,
    fill_check,
    hash_chain,
    narrow,
    read_entry,
)
from vua.native.transfer import (
    FAILED,
    KINDS,
    NOWHERE,
    PRESENT,
    WRITTEN,
    HeaderForm,
    Headers,
    MemoryMap,
    Spread,
    Transfer,
    WriteOptions,
    blocks_of,
)
