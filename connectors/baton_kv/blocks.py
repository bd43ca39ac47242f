"""Read and write the engine's KV cache as whole blocks of opaque bytes.

The layout inside a block is the attention backend's, so nothing smaller than a block is moved. This module
does not import vLLM: it takes tensors and gives bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch


class LayoutRefused(Exception):
    """The KV tensors cannot be moved block by block."""


class KVBlocks:
    """The KV tensors of all layers, each viewed as uint8 `[num_blocks, block_bytes]`.

    Args:
        layers: the KV tensors in the order of the layers, each `[num_blocks, ...]` of any dtype.

    Attributes:
        count: number of blocks in the pool.
        block_bytes: bytes of one block of one layer.

    Raises:
        LayoutRefused: a block is not contiguous, or the layers' blocks differ in number or size.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = [_as_bytes(layer) for layer in layers]
        shapes = {layer.shape for layer in self._layers}
        if len(shapes) != 1:
            raise LayoutRefused(
                f"the KV cache has layers of {len(shapes)} different shapes; all must be equal"
            )
        self.count, self.block_bytes = shapes.pop()

    def __len__(self) -> int:
        return len(self._layers)

    def gather(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """Return one memoryview of `block_bytes` for each block id: the block itself on CPU, else a copy."""
        if (rows := self.rows(layer, block_ids)) is not None:
            return rows
        pool = self._layers[layer]
        index = torch.tensor(block_ids, device=pool.device)
        return [memoryview(block) for block in pool.index_select(0, index).cpu().numpy()]

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        """Write `len(block_ids) * block_bytes` bytes into these blocks of a layer."""
        pool = self._layers[layer]
        blocks = numpy.frombuffer(data, numpy.uint8).reshape(len(block_ids), self.block_bytes)
        if pool.device.type == "cpu":
            # numpy copies in this thread; torch would wake its thread pool, which the model needs.
            rows = pool.numpy()
            for block_id, block in zip(block_ids, blocks, strict=True):
                numpy.copyto(rows[block_id], block)
            return
        index = torch.tensor(block_ids, device=pool.device)
        pool.index_copy_(0, index, torch.from_numpy(blocks.copy()).to(pool.device))

    def rows(self, layer: int, block_ids: Sequence[int]) -> list[memoryview] | None:
        """Return writable views of these blocks of a layer; None if the pool is not in host memory."""
        pool = self._layers[layer]
        if pool.device.type != "cpu":
            return None
        rows = pool.numpy()
        return [memoryview(rows[block]) for block in block_ids]


def _as_bytes(layer: torch.Tensor) -> torch.Tensor:
    if layer.dim() < 2 or layer.shape[0] < 1 or not layer[0].is_contiguous():
        raise LayoutRefused(
            f"a KV tensor's blocks are not contiguous: shape {tuple(layer.shape)}, strides {layer.stride()}"
        )
    return layer.view(torch.uint8).flatten(1) if layer.is_contiguous() else _strided(layer)


def _strided(layer: torch.Tensor) -> torch.Tensor:
    """View a layer whose blocks are interleaved with those of other layers."""
    as_bytes = layer.view(torch.uint8)
    size = as_bytes[0].numel()
    return as_bytes.as_strided((layer.shape[0], size), (as_bytes.stride(0), 1))
