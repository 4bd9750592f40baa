"""S3's inventory reports: the objects of a bucket as they were once, listed without requests.

A report is a ``manifest.json`` and CSV files, as "Amazon S3 Inventory" in S3's user guide describes
them: ``PREFIX/BUCKET/CONFIG/2026-11-26T01-00Z/manifest.json`` names ``.../CONFIG/data/*.csv.gz``.
It is read from its bucket, or from a copy of the folder ``CONFIG`` (a ``file://`` URL).
"""

from __future__ import annotations

import csv
import hashlib
import json
import weakref
import zlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Final
from urllib.parse import unquote_plus, urlsplit

from vua.catalog.chunk_table import temporary_database
from vua.errors import ConfigError, StorageError
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath
from vua.storage.signed_reads import Meta

_MANIFEST: Final = "manifest.json"
_MANIFEST_NBYTES: Final = 64 << 20
_PART_NBYTES: Final = 8 << 20
"""Read by one request."""
_NEEDED: Final = ("Bucket", "Key", "Size", "LastModifiedDate")
_GZIP: Final = 16 + zlib.MAX_WBITS
_SCHEMA: Final = (
    "CREATE TABLE objects (namespace TEXT, key TEXT, nbytes INT, modified_s REAL, tag BLOB)"
)


class Inventory:
    """A report of one bucket."""

    def __init__(self, url: str) -> None:
        """Read the manifest at ``url``. Raises ConfigError where it is none, StorageError."""
        folder, _, name = url.rpartition("/")
        config, _, date = folder.rpartition("/")
        if name != _MANIFEST or not date:
            msg = f"{url}: give the URL of an inventory's {_MANIFEST}"
            raise ConfigError(msg)
        self._url, self._folder = url, BucketPath(Bucket.at(config))
        try:
            manifest = json.loads((self._folder / date / _MANIFEST).read(_MANIFEST_NBYTES))
            self._bucket = str(manifest["sourceBucket"])
            self.taken_s = int(manifest["creationTimestamp"]) / 1000
            """When the objects were listed, in seconds since 1970."""
            self._files = [(str(one["key"]), str(one["MD5checksum"])) for one in manifest["files"]]
            kind, fields = (
                manifest["fileFormat"],
                manifest["fileSchema"].replace(" ", "").split(","),
            )
        except FileNotFoundError:
            msg = f"{url}: no such object"
            raise ConfigError(msg) from None
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            msg = f"{url}: not the manifest of an S3 inventory ({problem!r})"
            raise ConfigError(msg) from None
        missing = [one for one in _NEEDED if one not in fields]
        if kind != "CSV" or missing:
            lacks = f", without {', '.join(missing)}" if missing else ""
            msg = (
                f"{url}: an inventory in {kind}{lacks}; VUA reads CSV with Size and "
                "LastModifiedDate: choose these in the bucket's inventory configuration"
            )
            raise ConfigError(msg)
        self._fields = fields
        self._base = temporary_database(_SCHEMA)
        weakref.finalize(self, self._base.close)

    @property
    def counts(self) -> Mapping[str, int]:
        """Requests that were sent for it, by kind."""
        return self._folder.bucket.counts

    def read(self, place: BucketPath) -> None:
        """Read the objects of the cache at ``place``.

        Raises ConfigError if the report is of another bucket; StorageError where a file is missing,
        or is not what the manifest says.
        """
        base = urlsplit(place.bucket.url)
        if base.netloc != self._bucket:
            msg = f"{self._url}: an inventory of {self._bucket!r}, and not of {base.netloc!r}"
            raise ConfigError(msg)
        path = base.path.strip("/")
        before = f"{path}/" if path else ""
        self._base.executemany(
            "INSERT INTO objects VALUES (?, ?, ?, ?, ?)", self._objects(before, place)
        )

    def objects(self, namespace: str) -> Iterator[Meta]:
        """Yield the objects of a namespace that were read, in the order of their keys."""
        rows = self._base.execute(
            "SELECT key, nbytes, modified_s, tag FROM objects WHERE namespace = ? ORDER BY key",
            (namespace,),
        )
        return (Meta(*row) for row in rows)

    def _objects(
        self, before: str, place: BucketPath
    ) -> Iterator[tuple[str, str, int, float, bytes]]:
        for row in self._rows():
            key = unquote_plus(row["Key"])
            is_gone = row.get("IsDeleteMarker") == "true" or row.get("IsLatest") == "false"
            if is_gone or not key.startswith(before):
                continue
            key = key.removeprefix(before)
            name, _, inside = key.removeprefix(f"{place.key}/" if place.key else "").partition("/")
            if inside:
                modified_s = datetime.fromisoformat(
                    row["LastModifiedDate"].replace("Z", "+00:00")
                ).timestamp()
                yield name, key, int(row["Size"]), modified_s, row.get("ETag", "").encode()

    def _rows(self) -> Iterator[Mapping[str, str]]:
        for key, digest in self._files:
            where = f"data/{key.rpartition('/')[2]}"
            try:
                for row in csv.reader(self._lines(where, digest)):
                    yield dict(zip(self._fields, row, strict=True))
            except (ValueError, zlib.error, csv.Error) as problem:
                raise self._bad(where, str(problem)) from None

    def _lines(self, where: str, digest: str) -> Iterator[str]:
        """Yield the lines of a compressed file; its last ones only if all of it is as it was."""
        place, offset, rest = self._folder / where, 0, b""
        plain, summed = zlib.decompressobj(_GZIP), hashlib.md5(usedforsecurity=False)
        try:
            nbytes = place.bucket.head(place.key).nbytes
            while offset < nbytes:
                part = place.bucket.get(place.key, offset, _PART_NBYTES)[1]
                offset += len(part)
                summed.update(part)
                *lines, rest = (rest + plain.decompress(part)).split(b"\n")
                yield from (one.decode() for one in lines)
        except FileNotFoundError:
            raise self._bad(where, "it is missing") from None
        if summed.hexdigest() != digest or not plain.eof:
            raise self._bad(where, "its MD5 is not the manifest's")
        if rest:
            yield rest.decode()

    def _bad(self, where: str, why: str) -> StorageError:
        return StorageError(5, f"{self._url}: {where}: {why}")
