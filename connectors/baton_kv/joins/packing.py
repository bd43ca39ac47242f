"""Read and write the keys and values in a slab, whose order in memory is the attention backend's own.

The order is learned, not known: the backend's own function writes numbers into a block, and where each is
found afterwards is where it writes keys and values. Nothing is assumed but that it stores them as they are,
keys and values each in one piece, in which tokens and values go on by equal steps, alone or in equal groups.

vLLM's CPU backend has two orders on x86: one for machines with AMX that compute in bfloat16, and one for all
others, with AVX-512 or AVX2. An engine that was found to have one of them reads the other's slabs too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values, each `[tokens, 1, head size]`, into a cache of one block,
`[1, 1, tokens, 2 * head size]`."""
PLAIN, AMX = "plain", "amx"
"""Packings of vLLM's CPU backend: its `vec` and `vec16`, for blocks of a multiple of 32 tokens, and `amx`."""
DIGIT = 128
"""Whole numbers below this are exact in every dtype of a KV cache."""


class PackingUnknown(Exception):
    """The backend does not store keys and values as they are, each once, in steps of equal size."""


@dataclass(frozen=True)
class Steps:
    """The steps of one axis in memory.

    Attributes:
        length: number of places.
        group: places that follow one another by `inner`; groups of them by `outer`.
        outer: distance of two groups, in values.
        inner: distance of two places in a group, in values.
    """

    length: int
    group: int
    outer: int
    inner: int

    @classmethod
    def candidates(cls, places: NDArray[numpy.int64]) -> Iterator[Steps]:
        """Yield the steps by which an axis with these places in memory, `[length]`, may go on."""
        length = len(places)
        for group in (size for size in range(1, length + 1) if length % size == 0):
            outer = int(places[group] - places[0]) if group < length else 0
            inner = int(places[1] - places[0]) if group > 1 else 0
            steps = cls(length, group, outer, inner)
            if numpy.array_equal(places, places[0] + steps.offsets()):
                yield steps
                return

    def offsets(self) -> NDArray[numpy.int64]:
        """Return the distance of each place from the first one, in values."""
        index = numpy.arange(self.length)
        return self.outer * (index // self.group) + self.inner * (index % self.group)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of groups, and of places in a group."""
        return self.length // self.group, self.group


@dataclass(frozen=True)
class Layout:
    """The places of a block's keys, or values, in its slab.

    Attributes:
        base: index of the first value of the first token.
        tokens: how tokens go on.
        values: how the values of a token go on.
    """

    base: int
    tokens: Steps
    values: Steps

    @classmethod
    def of(cls, places: NDArray[numpy.int64]) -> Layout:
        """Find the layout with these places: the index in the slab of each value, `[tokens, head size]`.

        Raises:
            PackingUnknown: tokens or values do not go on by equal steps.
        """
        tokens = next(Steps.candidates(places[:, 0]), None)
        values = next(Steps.candidates(places[0]), None)
        if tokens is None or values is None:
            raise PackingUnknown
        found = cls(int(places[0, 0]), tokens, values)
        index = numpy.arange(places.max() + 1)
        if found.base + places.size > len(index):
            raise PackingUnknown
        if not numpy.array_equal(found.view(index).reshape(places.shape), places):
            raise PackingUnknown
        return found

    @property
    def by_values(self) -> bool:
        """Return whether the same value of the next token is nearer than the next value."""
        token = self.tokens.inner or self.tokens.outer
        return token < (self.values.inner or self.values.outer)

    @cached_property
    def _axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lengths of the four axes in their order in memory, and the place of each axis in that order."""
        steps = (self.tokens.outer, self.tokens.inner, self.values.outer, self.values.inner)
        lengths = (*self.tokens.shape, *self.values.shape)
        order = sorted(range(4), key=lambda axis: steps[axis], reverse=True)
        return tuple(lengths[axis] for axis in order), tuple(order.index(axis) for axis in range(4))

    def view(self, slabs: NDArray[Any]) -> NDArray[Any]:
        """View slabs, `[..., values of a slab]`, without copying.

        Returns:
            `[..., groups of tokens, tokens of a group, groups of values, values of a group]`.
        """
        (lengths, places), before = self._axes, slabs.ndim - 1
        size = self.tokens.length * self.values.length
        held = slabs[..., self.base : self.base + size]
        split = held.reshape(*slabs.shape[:-1], *lengths, copy=False)
        return split.transpose(*range(before), *(before + place for place in places))

    def write(self, slab: NDArray[Any], first: int, given: NDArray[Any]) -> None:
        """Write `[heads, tokens, head size]` from token `first` on into one block of `[heads, values]`."""
        view, size, at = self.view(slab), self.tokens.group, first
        given = given.reshape(*given.shape[:2], *self.values.shape)
        stop = first + given.shape[1]
        while at < stop:
            if at % size == 0 and stop - at >= size:
                groups = (stop - at) // size
                until = at + groups * size
                part = given[:, at - first : until - first]
                view[:, at // size : until // size] = part.reshape(
                    len(given), groups, size, *self.values.shape
                )
            else:
                until = min(stop, at - at % size + size)
                inside = slice(at % size, at % size + until - at)
                view[:, at // size, inside] = given[:, at - first : until - first]
            at = until


class SlabPacking:
    """The packing of keys and values in a slab.

    Args:
        keys: index in the slab of each value of the keys, `[tokens, head size]`.

    Attributes:
        places: that of each value of the keys, then of the values.

    Raises:
        PackingUnknown: these are no steps of equal size.
    """

    def __init__(self, keys: NDArray[numpy.int64], values: NDArray[numpy.int64], dtype: torch.dtype) -> None:
        self.tokens, self.head_size = keys.shape
        self.places = numpy.concatenate([keys.ravel(), values.ravel()])
        self.torch_dtype = dtype
        self._keys, self._values = Layout.of(keys), Layout.of(values)
        self._brain_floats = dtype is torch.bfloat16
        self.dtype: Any = numpy.dtype({torch.float32: "f4", torch.float16: "f2", torch.bfloat16: "u2"}[dtype])

    @classmethod
    def learn(cls, tokens: int, head_size: int, dtype: torch.dtype, write: Write) -> SlabPacking:
        """Find the packing of blocks of so many tokens by letting the backend's function write known numbers.

        Raises:
            PackingUnknown: it does not store every number as it is, once, in steps of equal size.
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

    @classmethod
    def known(cls, name: str, tokens: int, head_size: int, dtype: torch.dtype) -> SlabPacking | None:
        """Return a packing of vLLM's CPU backend by its name; None: there is none for such blocks."""
        token, value = numpy.mgrid[:tokens, :head_size]
        if name == PLAIN:
            return cls(value * tokens + token, tokens * head_size + token * head_size + value, dtype)
        if name != AMX or dtype.itemsize != 2 or tokens % 32 or head_size % 32:
            return None
        keys = token // 16 * 16 * head_size + value // 2 * 32 + token % 16 * 2 + value % 2
        values = value // 16 * 16 * tokens + token // 2 * 32 + value % 16 * 2 + token % 2
        return cls(keys, tokens * head_size + values, dtype)

    @property
    def name(self) -> str:
        """Return the name of a packing that is `known`; empty: it is not."""
        for name in (PLAIN, AMX):
            found = SlabPacking.known(name, self.tokens, self.head_size, self.torch_dtype)
            if found is not None and numpy.array_equal(found.places, self.places):
                return name
        return ""

    @property
    def by_values(self) -> bool:
        """Return whether the keys are stored value by value, not token by token."""
        return self._keys.by_values

    def unpack(self, slabs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return keys and values, `[heads, blocks * tokens, head size]`, of slabs `[heads, blocks, values]`.

        The keys are float32, a copy in the order of memory that they are stored in; the values have `dtype`.
        """
        keys, values = (self._copied(slabs, layout) for layout in (self._keys, self._values))
        return self._as_floats(keys), values

    def _copied(self, slabs: NDArray[Any], layout: Layout) -> NDArray[Any]:
        """Return keys or values of slabs as `[heads, blocks * tokens, head size]`."""
        heads, blocks, _ = slabs.shape
        if layout.by_values:
            found = numpy.empty((heads, self.head_size, blocks * self.tokens), slabs.dtype).swapaxes(1, 2)
        else:
            found = numpy.empty((heads, blocks * self.tokens, self.head_size), slabs.dtype)
        split = found.reshape(heads, blocks, *layout.tokens.shape, *layout.values.shape, copy=False)
        split[...] = layout.view(slabs)
        return found

    def pack(
        self, slab: NDArray[Any], first: int, keys: NDArray[numpy.float32], values: NDArray[Any]
    ) -> None:
        """Write keys and values of consecutive tokens into one block, from its token `first` on.

        Args:
            slab: the block of each head, `[heads, values of a slab]` of `dtype`, written in place.
            first: index in the block of the first token.
            keys: `[heads, tokens, head size]`.
            values: the same, of `dtype`.
        """
        self._keys.write(slab, first, self._as_stored(keys))
        self._values.write(slab, first, values)

    def _as_floats(self, stored: NDArray[Any]) -> NDArray[numpy.float32]:
        if self._brain_floats:
            return (stored.astype(numpy.uint32) << 16).view(numpy.float32)
        return stored.astype(numpy.float32, copy=False)

    def _as_stored(self, keys: NDArray[numpy.float32]) -> NDArray[Any]:
        if not self._brain_floats:
            return keys.astype(self.dtype, copy=False)
        bits = keys.astype(numpy.float32, copy=True).view(numpy.uint32)  # rounded to nearest, ties to even
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


@dataclass(frozen=True)
class Packings:
    """The packings of one engine's layers, all of one name.

    Attributes:
        layers: that of each layer; None: it has no keys and values, and is the same everywhere.
    """

    name: str
    layers: tuple[SlabPacking | None, ...]
    _orders: dict[tuple[int, int, str, torch.dtype], NDArray[numpy.int64] | None] = field(
        default_factory=dict, init=False
    )

    @classmethod
    def of(cls, layers: Sequence[SlabPacking | None]) -> Packings | None:
        """Return the packings of layers; None: not all of them have one name that is known."""
        names = {layer.name for layer in layers if layer is not None}
        return cls(names.pop(), tuple(layers)) if len(names) == 1 and "" not in names else None

    def knows(self, name: str) -> bool:
        """Return whether slabs that were packed so can be read."""
        return all(self._order(layer, name) is not None for layer in self.layers if layer is not None)

    def repack(self, layer: int, slabs: memoryview, name: str) -> None:
        """Bring slabs of a layer, which were packed so, into its own order, in place."""
        own = self.layers[layer]
        if own is not None and (order := self._order(own, name)) is not None:
            held = numpy.frombuffer(slabs, own.dtype).reshape(-1, len(order))
            held[...] = held.take(order, axis=1)

    def _order(self, own: SlabPacking, name: str) -> NDArray[numpy.int64] | None:
        """Return where each value of a slab is in one that was packed so; None: nobody knows."""
        shape = (own.tokens, own.head_size, name, own.torch_dtype)
        if shape not in self._orders:
            other = SlabPacking.known(name, own.tokens, own.head_size, own.torch_dtype)
            order = None
            if other is not None:
                order = numpy.empty(len(own.places), numpy.int64)
                order[own.places] = other.places
            self._orders[shape] = order
        return self._orders[shape]
