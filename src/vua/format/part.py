"""One rectangle of a chunk: the runs it consists of in a file, and where they lie in memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vua.format.layout import KVLayout, MemoryMap, Shard

__all__ = ["Part"]


class Part:
    """How one rectangle is taken out of (or put into) files of one shard, for any chunk.

    The runs of the rectangle in file order (array, head, layer), with their place in the file, and
    the units they form with the place of each in the table of checksums. Where the rectangle cuts
    through units, it is widened to whole ones and the runs outside ``target`` go to a *sink*, some
    memory of whoever reads: they are read only to be verified. Computed once for all chunks and all
    memory. Immutable.
    """

    def __init__(self, layout: KVLayout, stored: Shard, taken: Shard, target: Shard) -> None:
        """Plan to move ``taken`` between files of shard ``stored`` and memory holding ``target``.

        Both ``stored`` and ``target`` contain ``taken``.
        """
        self.layout, self.stored = layout, stored
        unit = layout.unit_layers
        first = (taken.layer_start - stored.layer_start) // unit * unit
        last = min(stored.layers, -(-(taken.layer_stop - stored.layer_start) // unit) * unit)
        array, head, layer = (
            grid.ravel()
            for grid in np.meshgrid(
                range(len(layout.dims)),
                np.arange(taken.head_start, taken.head_stop),
                np.arange(first, last),
                indexing="ij",
            )
        )
        sizes = np.array(layout.run_nbytes, dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(sizes * stored.heads * stored.layers)[:-1]))
        stored_head = head - stored.head_start
        self.nbytes: npt.NDArray[np.int64] = sizes[array]
        """Bytes of each run."""
        self.offset: npt.NDArray[np.int64] = (
            starts[array] + (stored_head * stored.layers + layer) * self.nbytes
        )
        """Byte offset of each run in the payload."""
        units = stored.units(layout)
        index = (array * stored.heads + stored_head) * units + layer // unit
        self.unit_start: npt.NDArray[np.int64] = np.flatnonzero(np.diff(index, prepend=-1))
        """The first run of each unit."""
        self.unit_index: npt.NDArray[np.int64] = index[self.unit_start]
        """The place of each unit's checksum in the file's table."""
        self._array = array
        inner = layer + stored.layer_start - target.layer_start
        self._inside = (inner >= taken.layer_start - target.layer_start) & (
            inner < taken.layer_stop - target.layer_start
        )
        self.head = (head - target.head_start).astype(np.uint64)
        """Per run: its head, counted from the target's first."""
        self.layer = np.where(self._inside, inner, 0).astype(np.uint64)
        """Per run: its layer, counted from the target's first."""
        self.space: npt.NDArray[np.int64] = np.where(self._inside, array, len(layout.dims))
        """Per run: the array whose memory it goes to; one more than there are for the sink."""
        lost = np.where(self._inside, 0, self.nbytes)
        self.sink_place = (np.cumsum(lost) - lost).astype(np.uint64)
        """Per run: where it begins in a sink of one piece; with more, the sink has them in turn."""
        self.sink_nbytes = int(lost.sum())
        """Bytes of the sink."""

    @property
    def whole(self) -> bool:
        """Whether every checksum of the file is needed."""
        return len(self.unit_index) == len(self.layout.dims) * self.stored.heads * (
            self.stored.units(self.layout)
        )

    def addresses(self, memory: MemoryMap, sink: int = 0) -> npt.NDArray[np.uint64]:
        """Return the address of each run's head and layer, before the piece offset, ``[runs]``.

        Args:
            memory: where the target's tokens lie.
            sink: address of the sink.
        """
        base = np.stack([np.asarray(row, dtype=np.uint64) for row in memory.base])
        stride = np.array(memory.head_stride, dtype=np.uint64)
        address = base[self._array, self.layer] + self.head * stride[self._array]
        pieces = np.uint64(self.layout.chunk_tokens // memory.piece_tokens)
        return np.where(self._inside, address, self.sink_place // pieces + np.uint64(sink))

    def piece_offsets(self, memory: MemoryMap, chunks: range) -> npt.NDArray[np.uint64]:
        """Return ``[spaces, chunks, pieces]``: what to add to :meth:`addresses` for each piece."""
        pieces = self.layout.chunk_tokens // memory.piece_tokens
        span = slice(chunks.start * pieces, chunks.stop * pieces)
        rows = [np.asarray(row[span], dtype=np.uint64) for row in memory.piece_offset]
        sink = np.arange(pieces, dtype=np.uint64) * np.uint64(self.sink_nbytes // pieces)
        rows.append(np.tile(sink, len(chunks)))
        return np.stack(rows).reshape(len(rows), len(chunks), pieces)

    def iovecs(
        self, runs: npt.NDArray[np.uint64], offsets: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Return ``[chunks, runs * pieces, 2]`` (address, nbytes) in file order.

        Args:
            runs: what :meth:`addresses` returned.
            offsets: what :meth:`piece_offsets` returned.
        """
        _, chunks, pieces = offsets.shape
        out = np.empty((chunks, len(runs), pieces, 2), dtype=np.uint64)
        out[..., 0] = runs[None, :, None] + offsets[self.space].transpose(1, 0, 2)
        out[..., 1] = (self.nbytes // pieces).astype(np.uint64)[None, :, None]
        return out.reshape(chunks, len(runs) * pieces, 2)

    def slices(self, limit: int) -> list[tuple[int, int]]:
        """Cut the units into ranges [first, stop) that are contiguous in the file.

        Each holds at most ``limit`` bytes, or one unit where a unit is longer.
        """
        sizes = np.add.reduceat(self.nbytes, self.unit_start)
        starts = self.offset[self.unit_start]
        gaps = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
        edges = [0, *gaps.tolist(), len(sizes)]
        ranges = []
        for begin, end in pairwise(edges):
            step = max(1, limit // int(sizes[begin:end].max()))
            ranges += [(at, min(at + step, end)) for at in range(begin, end, step)]
        return ranges
