"""Copy between the KV cache and host memory in the order of the model's work. Only this module knows streams.

On a GPU the model's kernels run behind the program, on a stream of their own. A copy must come after what the
model was given before it: the forward pass that computed a block, and vLLM's zeroing of a block that is to be
filled. So the worker's main thread takes a fence with each step's jobs (a CUDA event on the model's stream),
and the threads that copy let their own stream wait for it. On CPUs the program is the order, and there is
nothing to wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy
import torch

Fence = Any
"""A mark in the model's work: a `torch.cuda.Event`, or None on CPUs."""


class Staging(Protocol):
    """The buffers and streams with which one thread copies.

    A pool is some heads of a layer, uint8 `[heads, blocks, rows, tokens, bytes]`. Slabs are given by head,
    those of one head by block.
    """

    def buffer(self, size: int) -> memoryview:
        """Return host memory to read an entry's bytes into, valid until the next call of `buffer`."""
        ...

    def gather(
        self, pool: torch.Tensor, block_ids: Sequence[int], room: memoryview | None = None
    ) -> list[memoryview]:
        """Return the slabs of these blocks, valid until the next call of `gather`.

        Given `room` of their size, from `Copies.memory`, they are copied into that and are slices of it.
        """
        ...

    def scatter(self, pool: torch.Tensor, block_ids: Sequence[int], data: memoryview, skip: int = 0) -> None:
        """Write slabs into these blocks; `data` may be overwritten when this returns.

        It holds as many slabs of each head, of which the first `skip` are left out.
        """
        ...

    def rows(self, pool: torch.Tensor, block_ids: Sequence[int]) -> list[memoryview] | None:
        """Return writable views of slabs in the pool itself; None if they are not contiguous host memory."""
        ...


class Copies(Protocol):
    """Copies of one engine's KV cache."""

    def begin_thread(self) -> None:
        """Prepare a thread that is about to copy."""
        ...

    def memory(self, size: int) -> memoryview:
        """Allocate host memory for good, of this process alone; what is not used of it takes no room."""
        ...

    def fence(self) -> Fence:
        """Return a mark after all that the model has been given so far; for the worker's main thread."""
        ...

    def staging(self, fence: Fence) -> AbstractContextManager[Staging]:
        """Reserve a staging for a thread; its copies come after the fence and end with the context."""
        ...


class HostStaging:
    """Copies where the KV cache is in host memory. One thread at a time uses it."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def buffer(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = private_memory(size)  # page-aligned, and reused
        return self._buffer

    def gather(
        self, pool: torch.Tensor, block_ids: Sequence[int], room: memoryview | None = None
    ) -> list[memoryview]:
        if room is not None:
            source = pool.numpy()
            slabs = numpy.frombuffer(room, numpy.uint8).reshape(len(source), -1, *source.shape[2:])
            for position, first, count in stretches(block_ids):
                numpy.copyto(slabs[:, position : position + count], source[:, first : first + count])
            return _slabs_in(room, len(source) * len(block_ids))
        if (rows := self.rows(pool, block_ids)) is not None:
            return rows
        return [memoryview(head[block].reshape(-1)) for head in pool.numpy() for block in block_ids]

    def scatter(self, pool: torch.Tensor, block_ids: Sequence[int], data: memoryview, skip: int = 0) -> None:
        # numpy copies in this thread; torch would wake its thread pool, which the model needs.
        target = pool.numpy()
        slabs = numpy.frombuffer(data, numpy.uint8).reshape(len(target), -1, *target.shape[2:])
        for position, first, count in stretches(block_ids):
            at = skip + position
            numpy.copyto(target[:, first : first + count], slabs[:, at : at + count])

    def rows(self, pool: torch.Tensor, block_ids: Sequence[int]) -> list[memoryview] | None:
        if not pool[0, 0].is_contiguous():
            return None
        slabs = pool.numpy().reshape(*pool.shape[:2], -1)
        return [memoryview(head[block]) for head in slabs for block in block_ids]


class HostCopies:
    """The `Copies` of a KV cache in host memory, for so many threads at once."""

    def __init__(self, threads: int) -> None:
        self._free: queue.SimpleQueue[HostStaging] = queue.SimpleQueue()
        for _ in range(threads):
            self._free.put(HostStaging())

    def begin_thread(self) -> None:
        if cores := cores_for(torch.device("cpu")):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cores)

    def memory(self, size: int) -> memoryview:
        return private_memory(size)

    def fence(self) -> Fence:
        return None

    @contextmanager
    def staging(self, fence: Fence) -> Iterator[Staging]:
        found = self._free.get()
        try:
            yield found
        finally:
            self._free.put(found)


class CudaStaging:
    """Copies through a stream, a slot of device memory and a slot of pinned host memory.

    Index operations move int64 or uint8 words, never numbers of the model's dtype. No run of blocks is larger
    than `slot_bytes`.
    """

    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self._device = device
        self._on_device = torch.empty(slot_bytes, dtype=torch.uint8, device=device)
        self._on_host = torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True)
        self._host = memoryview(self._on_host.numpy())
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event(blocking=True)

    def begin(self, fence: Fence) -> None:
        """Bind this thread to the device, and order its copies after the fence."""
        torch.cuda.set_device(self._device)
        self._stream.wait_event(fence)

    def end(self) -> None:
        """Wait until all copies have ended."""
        self._stream.synchronize()

    def buffer(self, size: int) -> memoryview:
        return self._host[:size]

    def gather(
        self, pool: torch.Tensor, block_ids: Sequence[int], room: memoryview | None = None
    ) -> list[memoryview]:
        size, count = pool[0, 0].numel(), len(pool) * len(block_ids)
        words = in_words(pool)
        host = self._host[: count * size] if room is None else room
        with torch.cuda.stream(self._stream):
            slot = self._on_device[: count * size]
            gathered = slot.view(words.dtype).view(len(pool), len(block_ids), *words.shape[2:])
            torch.index_select(words, 1, self._index(block_ids), out=gathered)
            torch.frombuffer(host, dtype=torch.uint8).copy_(slot, non_blocking=True)
            self._copied.record(self._stream)
        self._copied.synchronize()
        return _slabs_in(host, count)

    def scatter(self, pool: torch.Tensor, block_ids: Sequence[int], data: memoryview, skip: int = 0) -> None:
        words = in_words(pool)
        with torch.cuda.stream(self._stream):
            slot = self._on_device[: len(data)]
            slot.copy_(_tensor_over(data), non_blocking=True)
            slabs = slot.view(words.dtype).view(len(pool), -1, *words.shape[2:])
            words.index_copy_(1, self._index(block_ids), slabs[:, skip : skip + len(block_ids)])
            self._copied.record(self._stream)
        self._copied.synchronize()

    def rows(self, pool: torch.Tensor, block_ids: Sequence[int]) -> list[memoryview] | None:
        return None

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._device)


class CudaCopies:
    """The `Copies` of a KV cache on a GPU; made at the start, so that too little memory shows there."""

    def __init__(self, device: torch.device, threads: int, slot_bytes: int) -> None:
        self._device = device
        self._free: queue.SimpleQueue[CudaStaging] = queue.SimpleQueue()
        for _ in range(threads):
            self._free.put(CudaStaging(device, slot_bytes))

    def begin_thread(self) -> None:
        """Do nothing: a thread stays on the cores of the worker, which are near its GPU."""

    def memory(self, size: int) -> memoryview:
        # The tensor lives for as long as the array over it, and that as the view.
        return memoryview(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy())

    def fence(self) -> Fence:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def staging(self, fence: Fence) -> Iterator[Staging]:
        found = self._free.get()
        try:
            found.begin(fence)
            try:
                yield found
            finally:
                found.end()
        finally:
            self._free.put(found)


def cores_for(device: torch.device) -> set[int]:
    """Find the cores on which the threads of a device's `Copies` run; none where the system does not tell.

    On CPUs vLLM binds a worker's first thread to one core, and threads inherit that: all copies would share
    the core on which the model computes. The worker's parent is not bound.
    """
    try:
        return os.sched_getaffinity(os.getppid() if device.type == "cpu" else 0)
    except (OSError, AttributeError):
        return set()


def private_memory(size: int) -> memoryview:
    """Allocate memory that no other process can write, on large pages where the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # not on every system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def stretches(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the stretches of blocks that follow one another in the pool: position, first block, count."""
    begin = 0
    for position in range(1, len(block_ids) + 1):
        if position == len(block_ids) or block_ids[position] != block_ids[position - 1] + 1:
            yield begin, block_ids[begin], position - begin
            begin = position


def _tensor_over(data: memoryview) -> torch.Tensor:
    """View host memory, which must stay, as a tensor to read from; torch warns of what is read-only."""
    place = numpy.frombuffer(data, numpy.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * len(data)).from_address(place), dtype=torch.uint8)


def _slabs_in(room: memoryview, count: int) -> list[memoryview]:
    """Return the slabs that fill some memory, in order."""
    size = len(room) // count
    return [room[at : at + size] for at in range(0, len(room), size)]


def in_words(pool: torch.Tensor) -> torch.Tensor:
    """View uint8 slabs as int64 where size and alignment allow, so that eight bytes are moved at once."""
    places = (pool.shape[-1], pool.storage_offset(), *pool.stride()[:-1])
    return pool.view(torch.int64) if all(place % 8 == 0 for place in places) else pool


def copies_for(device: torch.device, threads: int, slot_bytes: int) -> Copies:
    """Return the copies of a KV cache on a device, for so many threads and runs of up to `slot_bytes`."""
    return HostCopies(threads) if device.type == "cpu" else CudaCopies(device, threads, slot_bytes)
