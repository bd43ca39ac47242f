"""The engine's KV pool as blocks of opaque bytes. No vLLM here: tensors in, bytes out.

What lies inside a block is the attention backend's own packing, so nothing smaller than a block is
ever moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch


class LayoutRefused(Exception):
    """These KV tensors cannot be moved block by block."""


class KVBlocks:
    """Every layer's KV tensor, viewed as `[num_blocks, block_bytes]` of uint8.

    Args:
        layers: the KV tensors in the order of the layers; their first dimension counts blocks.

    Raises:
        LayoutRefused: a block is not one run of bytes, or layers differ.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = [_as_bytes(layer) for layer in layers]
        shapes = {layer.shape for layer in self._layers}
        if len(shapes) != 1:
            raise LayoutRefused(f"layers of {len(shapes)} different shapes")
        self.count, self.block_bytes = shapes.pop()

    def __len__(self) -> int:
        return len(self._layers)

    def gather(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of some blocks, in the order asked: the blocks themselves where the pool is in memory."""
        if (rows := self.rows(layer, block_ids)) is not None:
            return rows
        pool = self._layers[layer]
        index = torch.tensor(block_ids, device=pool.device)
        return [memoryview(block) for block in pool.index_select(0, index).cpu().numpy()]

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        """Put `len(block_ids) * block_bytes` bytes where those blocks are."""
        pool = self._layers[layer]
        blocks = numpy.frombuffer(data, numpy.uint8).reshape(len(block_ids), self.block_bytes)
        if pool.device.type == "cpu":
            rows = (
                pool.numpy()
            )  # numpy stays in this thread; torch would wake its pool, which the model needs
            for block_id, block in zip(block_ids, blocks, strict=True):
                numpy.copyto(rows[block_id], block)
            return
        index = torch.tensor(block_ids, device=pool.device)
        pool.index_copy_(0, index, torch.from_numpy(blocks.copy()).to(pool.device))

    def rows(self, layer: int, block_ids: Sequence[int]) -> list[memoryview] | None:
        """Those blocks themselves, to be written into; None where they are not in this machine's memory."""
        pool = self._layers[layer]
        if pool.device.type != "cpu":
            return None
        rows = pool.numpy()
        return [memoryview(rows[block]) for block in block_ids]


def _as_bytes(layer: torch.Tensor) -> torch.Tensor:
    if layer.dim() < 2 or layer.shape[0] < 1 or not layer[0].is_contiguous():
        raise LayoutRefused(f"a KV tensor of shape {tuple(layer.shape)}, strides {layer.stride()}")
    return layer.view(torch.uint8).flatten(1) if layer.is_contiguous() else _strided(layer)


def _strided(layer: torch.Tensor) -> torch.Tensor:
    """Blocks that lie apart, other layers' between them."""
    as_bytes = layer.view(torch.uint8)
    size = as_bytes[0].numel()
    return as_bytes.as_strided((layer.shape[0], size), (as_bytes.stride(0), 1))
