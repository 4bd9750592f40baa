"""Names: SGLang's page hashes are VUA's chunk names.

SGLang hands a backend the hashes of some pages and of all pages before them, never tokens. A
request's cache salt, ``extra_key`` and LoRA adapter are in the hash of its first page, as a seed
that stands where other first pages have no parent. So such pages have names of SGLang's own: they
meet no other salt, and no other engine's. An adapter is named there by SGLang's id; its content is
in the identity (`vua.sglang.identity`).
"""

from __future__ import annotations

from collections.abc import Sequence

from vua.format.keys import ChunkKey

__all__ = ["chunk_keys"]


def chunk_keys(before: Sequence[str], pages: Sequence[str], chunk_tokens: int) -> list[ChunkKey]:
    """Return the keys of a prompt's first pages, those ``before`` included.

    Args:
        before: hashes (64 hex) of all pages in front of ``pages``.
        pages: hashes of pages that follow each other.
        chunk_tokens: tokens per page.

    >>> [key.start for key in chunk_keys(["00" * 32], ["11" * 32], 64)]
    [0, 64]
    """
    keys, parent = [], b""
    for at, name in enumerate((*before, *pages)):
        digest = bytes.fromhex(name)
        keys.append(ChunkKey(digest, parent, at * chunk_tokens, (at + 1) * chunk_tokens))
        parent = digest
    return keys
