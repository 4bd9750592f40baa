"""Names of prefixes: a chain of SHA-256 digests over token ids, one per chunk.

``h(i) = SHA-256(h(i-1) || tokens of chunk i as little-endian u32)``; the first chunk has no parent.
A chunk's name stands for *all* tokens up to its end. Equal names mean equal prefixes (to the
strength of SHA-256), and comparing names finds the longest stored prefix. Without extras this is
the page hash of SGLang's HiCache (sha256 over parent digest and uint32 token ids), so engines that
pass hashes instead of tokens find the same chunks. PYTHONHASHSEED, the engine, and the dtype or
container of the tokens do not change a name.

A part of one request that changes its K/V without being a token (cache salt, LoRA adapter,
image content) enters as *extras*, at the first chunk where it matters. There the parent is replaced
by a digest over a tag, the parent and the length-prefixed extras.

With a secret (:class:`Naming`) HMAC-SHA256 replaces SHA-256 throughout. Names then tell nothing to
a reader without the secret: neither what was asked, nor whether two requests share a prompt.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from vua.errors import InputError
from vua.format.identity import framed
from vua.native import hash_chain, narrow

if TYPE_CHECKING:
    import torch

_EXTRAS_TAG: Final = b"vua.extras.v1"


class Naming(NamedTuple):
    """Makes names secret."""

    tenant: str
    """Owner of the key (:class:`vua.security.keyring.Keyring`); empty for the directory's own."""
    secret: bytes
    """The namespace's secret, 32 bytes."""

    def __repr__(self) -> str:
        return f"Naming({self.tenant!r})"


def extras_parent(
    parent: bytes, extras: Sequence[tuple[str, bytes]], naming: Naming | None = None
) -> bytes:
    """Return the digest that replaces ``parent`` where ``extras`` (tag, value) first matter.

    Tags and values are length-prefixed and counted, so different lists of extras never give the
    same digest, and none gives that of a plain parent.
    """
    pairs = (part for tag, value in extras for part in (tag.encode(), value))
    text = _EXTRAS_TAG + framed(parent, len(extras).to_bytes(4, "little"), *pairs)
    if naming is not None:
        return hmac.digest(naming.secret, text, "sha256")
    return hashlib.sha256(text).digest()


def secret_chain(secret: bytes, parent: bytes, ids: memoryview, chunk_nbytes: int) -> bytes:
    """Like :func:`vua.native.hash_chain`, but an HMAC with ``secret``."""
    digests = bytearray()
    for start in range(0, len(ids), chunk_nbytes):
        text = parent + ids[start : start + chunk_nbytes]
        parent = hmac.digest(secret, text, "sha256")
        digests += parent
    return bytes(digests)


_HASH_NBYTES: Final = 32


class ChunkKey(NamedTuple):
    """Names one chunk: its prefix hash, its parent's, and its token range in the prompt."""

    prefix_hash: bytes
    """SHA-256 of parent and tokens, 32 bytes."""
    parent: bytes
    """The bytes hashed before the tokens: 32, or empty for a plain first chunk."""
    start: int
    """Index of the chunk's first token in the prompt."""
    stop: int
    """One past the index of its last token."""
    previous: bytes = b""
    """The preceding chunk's hash if extras hide it in ``parent``; else empty."""
    tenant: str = ""
    """Tenant whose key seals the file."""

    @property
    def before(self) -> bytes:
        """The preceding chunk's prefix hash, empty for a first chunk."""
        return self.previous or (self.parent if self.start else b"")

    @property
    def name(self) -> str:
        """The prefix hash in hex: the chunk's directory name."""
        return self.prefix_hash.hex()


def token_ids(tokens: torch.Tensor | npt.NDArray[np.generic] | Sequence[int]) -> bytes:
    """Return one sequence of token ids as little-endian u32 bytes.

    Args:
        tokens: integer tensor or array of shape (T,) or (1, T) on any device, or a sequence of int.

    Raises:
        InputError: not integers, negative, above 2**32 - 1, or not one sequence.
    """
    array = _as_array(tokens)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise InputError(
            f"token ids of shape {array.shape} are not one sequence; expected (T,) or (1, T). "
            "Pass one sequence at a time or use the batched form of put()/get_closest()."
        )
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        msg = f"token ids must be integers, found dtype {array.dtype}; convert them with .long()"
        raise InputError(msg)
    if (narrowed := narrow(array)) is not None:
        return narrowed
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 0xFFFFFFFF:
        raise InputError(f"token ids must lie in 0..2**32-1, found {low if low < 0 else high}")
    return array.astype("<u4", copy=False).tobytes()


def _as_array(tokens: torch.Tensor | npt.NDArray[Any] | Sequence[int]) -> npt.NDArray[Any]:
    if isinstance(tokens, np.ndarray):
        return tokens
    if hasattr(tokens, "detach"):  # a torch tensor, without importing torch for it
        try:
            array: npt.NDArray[Any] = tokens.detach().cpu().numpy()
        except (TypeError, RuntimeError) as problem:  # bfloat16, sparse, meta...
            raise InputError(f"token ids must be plain integers: {problem}") from problem
        return array
    try:
        return np.asarray(tokens if len(tokens) else np.empty(0, np.int64))
    except (TypeError, ValueError, OverflowError) as problem:
        msg = f"token ids must be a tensor, an array or a sequence of int, found {type(tokens)}"
        raise InputError(msg) from problem


class Keys(Protocol):
    """A prompt's chunk keys: a list of them, a :class:`KeyChain` or a :class:`KeyRun`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> ChunkKey: ...


class KeyRun(Sequence[ChunkKey]):
    """Keys of consecutive chunks in 32 bytes each: cheap to slice and pickle.

    >>> run = KeyChain(token_ids(range(256)), 64).run(1, 4)
    >>> len(run), run[0].start, run[1].parent == run[0].prefix_hash, len(run[1:])
    (3, 64, True, 2)
    """

    __slots__ = ("_chunk_tokens", "_first", "_known", "_length", "tenant")

    def __init__(
        self,
        first: int,
        chunk_tokens: int,
        digests: bytes,
        parents: Mapping[int, tuple[bytes, bytes]],
        tenant: str = "",
    ) -> None:
        """Use what :class:`KeyChain` computed.

        Args:
            digests: prefix hashes, 32 bytes each.
            parents: chunk index -> its key's parent and ``previous``, for the first chunk and for
                every chunk whose parent is not the prefix hash before it.
        """
        self.tenant = tenant
        """Owner of the key that makes the names secret; see :class:`Naming`."""
        self._first, self._chunk_tokens = first, chunk_tokens
        self._length, self._known = len(digests) // _HASH_NBYTES, (digests, parents)

    def _upto(self, stop: int) -> tuple[bytes, Mapping[int, tuple[bytes, bytes]]]:  # noqa: ARG002
        """Return the digests of at least ``stop`` chunks, with their parents."""
        return self._known

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> ChunkKey: ...
    @overload
    def __getitem__(self, index: slice) -> KeyRun: ...
    def __getitem__(self, index: int | slice) -> ChunkKey | KeyRun:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"a run of keys has no slices of step {step}")
            digests, known = self._upto(stop)
            first, last = self._first + start, self._first + stop
            parents = {at: above for at, above in known.items() if first <= at < last}
            if start < stop:
                key = self.key(start)
                parents[first] = key.parent, key.previous
            cut = digests[_HASH_NBYTES * start : _HASH_NBYTES * stop]
            return KeyRun(first, self._chunk_tokens, cut, parents, self.tenant)
        return self.key(index if 0 <= index < self._length else range(self._length)[index])

    def run(self, first: int, stop: int) -> KeyRun:
        """Return the keys ``first`` to ``stop``, as :meth:`KeyChain.run`."""
        return self[first:stop]

    @property
    def prefix_hashes(self) -> list[bytes]:
        """The prefix hashes of all keys, without building the keys."""
        nbytes = _HASH_NBYTES * self._length
        digests, _ = self._upto(self._length)
        return [digests[at : at + _HASH_NBYTES] for at in range(0, nbytes, _HASH_NBYTES)]

    def key(self, index: int) -> ChunkKey:
        """Return the key at ``index``, 0 <= index < len."""
        digests, parents = self._known
        place, chunk = index * _HASH_NBYTES, self._first + index
        if len(digests) <= place:
            digests, parents = self._upto(index + 1)
        digest = digests[place : place + _HASH_NBYTES]
        above = parents.get(chunk)
        parent, previous = above or (digests[place - _HASH_NBYTES : place], b"")
        start = chunk * self._chunk_tokens
        stop = start + self._chunk_tokens
        return ChunkKey(digest, parent, start, stop, previous, self.tenant)


class KeyChain(KeyRun):
    """The chunk keys of one prompt, hashed as far as they are asked for: a miss costs one hash.

    >>> chain = KeyChain(token_ids(range(130)), 64)
    >>> len(chain), chain[1].start, chain[1].parent == chain[0].prefix_hash
    (2, 64, True)
    """

    def __init__(
        self,
        ids: bytes,
        chunk_tokens: int,
        extras: Mapping[int, Sequence[tuple[str, bytes]]] | None = None,
        naming: Naming | None = None,
    ) -> None:
        """Name the whole chunks of ``ids``.

        Args:
            chunk_tokens: tokens per chunk; an incomplete last chunk has no name.
            extras: chunk index -> (tag, value) pairs that K/V depend on from that chunk on.
        """
        tenant = "" if naming is None else naming.tenant
        super().__init__(0, chunk_tokens, b"", {0: (b"", b"")}, tenant)
        self._ids, self._length = ids, len(ids) // (4 * chunk_tokens)
        self._extras, self._naming = dict(extras or {}), naming

    def first(self, count: int) -> list[ChunkKey]:
        return list(self[:count])

    def longer(self, ids: bytes) -> KeyChain:
        """Return the chain of a longer prompt that begins with this one; hashes are reused.

        ``ids`` are all token ids of the longer prompt.
        """
        other = KeyChain(ids, self._chunk_tokens, self._extras, self._naming)
        other._known = self._known
        return other

    def _upto(self, stop: int) -> tuple[bytes, Mapping[int, tuple[bytes, bytes]]]:
        # Threads may hash the same chunks at once, and each sets digests and parents together.
        known, above = self._known
        done, nbytes = len(known) // _HASH_NBYTES, 4 * self._chunk_tokens
        if done >= stop:
            return known, above
        count = max(stop, min(2 * done, self._length))  # or keys one by one would copy all each
        digests, parents = bytearray(known), dict(above)
        edges = sorted({done, *(at for at in self._extras if done < at < count), count})
        for start, end in pairwise(edges):
            before = bytes(digests[-_HASH_NBYTES:])
            parent = before
            if start in self._extras:
                parent = extras_parent(before, self._extras[start], self._naming)
                parents[start] = parent, before
            part = memoryview(self._ids)[nbytes * start : nbytes * end]
            if self._naming is None:
                digests += hash_chain(parent, part, nbytes)
            else:
                digests += secret_chain(self._naming.secret, parent, part, nbytes)
        found = self._known = bytes(digests), parents
        return found
