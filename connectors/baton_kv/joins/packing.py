"""Read and write the keys and values in a slab, whose order in memory is the attention backend's own.

The order is learned, not known: the backend's own function writes numbers into a block, and where each is
found afterwards is where it writes keys and values. Nothing is assumed but that it moves them and does not
change them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values, each `[tokens, 1, head size]`, into a cache of one block,
`[1, 1, tokens, 2 * head size]`."""
DIGIT = 128
"""Whole numbers below this are exact in every dtype of a KV cache."""


class PackingUnknown(Exception):
    """The backend does not store keys and values as they are, each once."""


class SlabPacking:
    """Where a slab holds each value of its keys and values.

    Args:
        keys: index in the slab of each value of the keys, `[tokens, head size]`.
        values: the same of the values.
        dtype: the KV cache's dtype.
    """

    def __init__(self, keys: NDArray[numpy.int64], values: NDArray[numpy.int64], dtype: torch.dtype) -> None:
        self.tokens, self.head_size = keys.shape
        self._keys, self._values = keys, values
        self._both = numpy.concatenate([keys.ravel(), values.ravel()])
        self._order = numpy.argsort(self._both)
        self._brain_floats = dtype is torch.bfloat16
        self.dtype: Any = numpy.dtype({torch.float32: "f4", torch.float16: "f2", torch.bfloat16: "u2"}[dtype])

    @classmethod
    def learn(cls, tokens: int, head_size: int, dtype: torch.dtype, write: Write) -> SlabPacking:
        """Find the packing by writing known numbers.

        Args:
            tokens: tokens of a block.
            head_size: values of a key.
            dtype: the KV cache's dtype.
            write: the backend's function.

        Raises:
            PackingUnknown: it does not store every number as it is, once.
        """
        count = 2 * tokens * head_size
        found = numpy.zeros(count, numpy.int64)
        for place in (1, DIGIT, DIGIT * DIGIT):
            digits = (torch.arange(count) // place) % DIGIT
            keys, values = digits.to(dtype).view(2, tokens, 1, head_size)
            cache = torch.full((1, 1, tokens, 2 * head_size), -1, dtype=dtype)
            write(keys.contiguous(), values.contiguous(), cache)
            found += place * cache.flatten().float().numpy().astype(numpy.int64)
        if not numpy.array_equal(numpy.sort(found), numpy.arange(count)):
            raise PackingUnknown
        places = numpy.empty(count, numpy.int64)
        places[found] = numpy.arange(count)
        keys_at, values_at = places.reshape(2, tokens, head_size)
        return cls(keys_at, values_at, dtype)

    @property
    def slab_bytes(self) -> int:
        """Return the bytes of a slab."""
        return int(self._both.size * self.dtype.itemsize)

    def unpack(self, slabs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return keys and values, each `[heads, blocks * tokens, head size]`, of slabs.

        Args:
            slabs: `[heads, blocks, values of a slab]` of `dtype`.

        Returns:
            The keys as float32, the values as `dtype`.
        """
        heads, blocks, _ = slabs.shape
        both = slabs.take(self._both, axis=2).reshape(heads, blocks, 2, self.tokens, self.head_size)
        shape = (heads, blocks * self.tokens, self.head_size)
        return self._as_floats(both[:, :, 0].reshape(shape)), both[:, :, 1].reshape(shape)

    def pack(
        self, slab: NDArray[Any], first: int, keys: NDArray[numpy.float32], values: NDArray[Any]
    ) -> None:
        """Write keys and values of consecutive tokens into one block.

        Args:
            slab: the block of each head, `[heads, values of a slab]` of `dtype`, written in place.
            first: index in the block of the first token.
            keys: `[heads, tokens, head size]`.
            values: the same, of `dtype`.
        """
        heads, count, _ = keys.shape
        rounded = self._as_stored(keys).reshape(heads, -1)
        if count == self.tokens:
            both = numpy.concatenate([rounded, values.reshape(heads, -1)], axis=1)
            numpy.copyto(slab, both.take(self._order, axis=1))
            return
        tokens = slice(first, first + count)
        slab[:, self._keys[tokens].ravel()] = rounded
        slab[:, self._values[tokens].ravel()] = values.reshape(heads, -1)

    def _as_floats(self, stored: NDArray[Any]) -> NDArray[numpy.float32]:
        if self._brain_floats:
            return (stored.astype(numpy.uint32) << 16).view(numpy.float32)
        return stored.astype(numpy.float32)

    def _as_stored(self, keys: NDArray[numpy.float32]) -> NDArray[Any]:
        if not self._brain_floats:
            return keys.astype(self.dtype, copy=False)
        bits = numpy.ascontiguousarray(keys).view(numpy.uint32)  # rounded to the nearest, ties to even
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
