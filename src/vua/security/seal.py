"""Seals: tags that only a holder of the key can make, and optional encryption.

A sealed file is a plain one with an AES-256-GCM tag per checksum block, by `cryptography`. The
nonce is the block's number. The key is unique to this file: derived from a random nonce in the
header and from the header up to there (namespace, layout, shard, chunk, parent, position, kind of
seal and key). So a machine that repeats its random numbers (a cloned VM) still does not encrypt two
chunks with one key. The tag is bound (as associated data) to the same part of the header. Tags of
kind ``gmac`` cover a block in clear, those of kind ``aes-256-gcm`` its ciphertext, which has the
same length. NIST SP 800-38D is the specification; keys are derived as in RFC 5869 (HKDF-Expand with
SHA-256; the key file is uniformly random).

The checksums of a sealed file cover the stored bytes, so a reader without the key still finds
damage. docs/decisions/0008-keyed-and-encrypted.md compares it with keyed BLAKE2b and BLAKE3.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext
from cryptography.hazmat.primitives.ciphers import Cipher as _Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from vua.errors import CorruptEntryError
from vua.format.entry import AUTHENTIC, ENCRYPTED, TAG_NBYTES, EntryCodec, SealInfo
from vua.format.keys import ChunkKey
from vua.native import Digest

_NONCE_NBYTES: Final = 12

Block: TypeAlias = Iterable[memoryview]


def new_nonce() -> str:
    """Return 32 random hex digits, so that each file has a key of its own."""
    return secrets.token_hex(16)


def derived(key: bytes, label: str, *context: str) -> bytes:
    """Return 32 bytes derived from ``key`` for ``label`` and ``context``: HKDF-Expand, RFC 5869."""
    parts = [part.encode() for part in (label, *context)]
    info = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(key, info + b"\x01", "sha256")


@dataclass(frozen=True, slots=True, repr=False)
class Seal:
    """One key as used in one namespace. Immutable, thread-safe; its repr shows no secret."""

    kind: str
    key_id: str
    """16 hex digits that name the key in headers."""
    naming: bytes
    """For :class:`vua.format.keys.Naming`."""
    _files: bytes

    @classmethod
    def of(cls, key: bytes, namespace: str, *, encrypt: bool) -> Seal:
        """Derive what ``namespace`` uses from a ``key`` of 32 random bytes.

        Signed and encrypted chunks have different names, so neither blocks the other.
        """
        kind = ENCRYPTED if encrypt else AUTHENTIC
        return cls(
            kind,
            derived(key, "vua.key-id.v1")[:8].hex(),
            derived(key, "vua.names.v1", kind, namespace),
            derived(key, "vua.files.v2", kind, namespace),
        )

    def __repr__(self) -> str:
        return f"Seal({self.kind!r}, {self.key_id!r})"

    def close(
        self,
        codec: EntryCodec,
        key: ChunkKey,
        blocks: Iterable[Block],
        into: npt.NDArray[np.uint8] | None = None,
    ) -> tuple[SealInfo, bytes]:
        """Seal a chunk in memory, which stays unchanged; return its file's nonce and tags.

        Args:
            codec: of its file, of this kind of seal.
            blocks: the bytes of each of its checksum blocks, in parts.
            into: memory for the encrypted payload, if the kind is ENCRYPTED.
        """
        seal_info = SealInfo(self.key_id, new_nonce())
        target = None if into is None else memoryview(into.data)
        tags = _fed(blocks, self._closings(codec, key, seal_info, target))
        return seal_info, b"".join(tag.to_bytes(TAG_NBYTES, "big") for tag in tags)

    def open(
        self,
        codec: EntryCodec,
        key: ChunkKey,
        header: memoryview,
        blocks: Iterable[Block],
        places: Sequence[int],
    ) -> None:
        """Check that a chunk in memory was sealed with this key, and decrypt it in place.

        Args:
            codec: of its file; it has checked the header.
            blocks: the bytes of its checksum blocks, in parts.
            places: the indices of these blocks in the file.

        Raises CorruptEntryError; the memory must not be used then.
        """
        if not all(_fed(blocks, self.openings(codec, key, header, places))):
            msg = "a tag does not match: sealed without this key, or changed since"
            raise CorruptEntryError(msg)

    def openings(
        self, codec: EntryCodec, key: ChunkKey, header: memoryview, places: Sequence[int]
    ) -> Iterator[Digest]:
        """Yield a digest per block; its number is 1 if the block's tag is right.

        Encrypted blocks are decrypted in place while they are fed to it.

        Args:
            codec: of the file; it has checked the header.
            header: of the file; must not change meanwhile.
            places: the indices of these checksum blocks in the file.

        Raises CorruptEntryError without a nonce.
        """
        nonce, tags = codec.seal_of(header)
        seal_info = SealInfo(self.key_id, nonce)
        algorithm, bound = self._context(codec, key, seal_info)

        def opening(block: int) -> Digest:
            context = _Cipher(algorithm, GCM(_nonce(block))).decryptor()
            context.authenticate_additional_data(bound)
            return _Opening(context, tags[block].tobytes(), in_place=self.kind == ENCRYPTED)

        return map(opening, places)

    def _context(self, codec: EntryCodec, key: ChunkKey, seal_info: SealInfo) -> tuple[AES, bytes]:
        """The cipher of one file, and the data that each of its blocks is bound to."""
        bound = codec.expected(key, self.key_id)
        file_key = hmac.digest(self._files, bytes.fromhex(seal_info.nonce) + bound, "sha256")
        return AES(file_key), len(bound).to_bytes(8, "little") + bound

    def _closings(
        self, codec: EntryCodec, key: ChunkKey, seal_info: SealInfo, target: memoryview | None
    ) -> Iterator[_Closing]:
        algorithm, bound = self._context(codec, key, seal_info)
        for block in range(codec.blocks):
            context = _Cipher(algorithm, GCM(_nonce(block))).encryptor()
            context.authenticate_additional_data(bound)
            closing = _Closing(context, target)
            yield closing
            target = None if target is None else target[closing.written :]


def _fed(blocks: Iterable[Block], digests: Iterator[Digest]) -> list[int]:
    """Feed each block to its digest and return the numbers; digests are made one at a time."""
    found = []
    for block in blocks:
        digest = next(digests)
        for part in block:
            digest.update(part)
        found.append(digest.intdigest())
    return found


def _nonce(block: int) -> bytes:
    return block.to_bytes(_NONCE_NBYTES, "big")


class _Closing:
    """One checksum block of a new file. Its number is its tag."""

    def __init__(self, context: AEADEncryptionContext, target: memoryview | None) -> None:
        self._context, self._target, self.written = context, target, 0

    def update(self, view: memoryview) -> None:
        if self._target is None:
            self._context.authenticate_additional_data(view)
        else:
            self.written += self._context.update_into(view, self._target[self.written :])

    def intdigest(self) -> int:
        self._context.finalize()
        return int.from_bytes(self._context.tag, "big")


class _Opening:
    """One checksum block that is read. Its number says whether its tag is right."""

    def __init__(self, context: AEADDecryptionContext, tag: bytes, *, in_place: bool) -> None:
        self._context, self._tag, self._in_place = context, tag, in_place

    def update(self, view: memoryview) -> None:
        if self._in_place:
            self._context.update_into(view, view)
        else:
            self._context.authenticate_additional_data(view)

    def intdigest(self) -> int:
        try:
            self._context.finalize_with_tag(self._tag)
        except InvalidTag:
            return 0
        return 1
