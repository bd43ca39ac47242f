"""What each computed token left for a latent one that may follow it: seeds, one per slot of the KV pool.

A seed lies where its token's KV lies, and is written with it: whatever the engine does with its blocks, a
token whose KV can be used has its seed. Who moves blocks elsewhere moves the seeds too, as further layers.
"""

from __future__ import annotations

import torch


class LatentMemory:
    """The seeds of one engine's KV pool, and how much was thought.

    Args:
        width: the model's hidden size.
        dtype: of its hidden states.
        device: where they are.

    Attributes:
        width, dtype: of a seed.
        steps: latent steps computed so far.
        seconds: how long they took.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = width
        self.dtype = dtype
        self._device = device
        self._seeds: torch.Tensor | None = None
        self.steps = 0
        self.seconds = 0.0

    def layers_beside(self, kv: torch.Tensor, block_size: int) -> list[torch.Tensor]:
        """The seeds as further layers of the pool, `[blocks, bytes]` of uint8, as large as those of `kv`.

        Args:
            kv: any layer's KV, its first dimension the blocks.
            block_size: slots in a block.
        """
        block_bytes = kv[0].numel() * kv.element_size()
        seed_bytes = block_size * self.width * self.dtype.itemsize
        count = -(-seed_bytes // block_bytes)
        pool = torch.zeros(kv.shape[0], count * block_bytes, dtype=torch.uint8, device=self._device)
        seeds = pool.view(self.dtype)[:, : block_size * self.width]
        self._seeds = seeds.unflatten(1, (block_size, self.width))
        return list(pool.split(block_bytes, dim=1))

    def counts(self) -> dict[str, float]:
        """What was thought so far, for whoever watches the engine."""
        return {"steps": self.steps, "seconds": self.seconds}

    def require(self, kv: torch.Tensor, block_size: int) -> None:
        """Make the pool if nobody asked for its layers before."""
        if self._seeds is None:
            self.layers_beside(kv, block_size)

    def keep(self, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        """Write the seeds of tokens, `hidden` `[tokens, width]`, into their slots."""
        assert self._seeds is not None
        block_size = self._seeds.shape[1]
        self._seeds[slots // block_size, slots % block_size] = hidden

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The seeds `[tokens, width]` in some slots."""
        assert self._seeds is not None
        block_size = self._seeds.shape[1]
        return self._seeds[slots // block_size, slots % block_size]
