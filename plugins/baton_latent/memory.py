"""Store the last hidden state of every computed token, from which a latent step after it starts (a seed).

There is one seed per slot of the KV cache, written together with the slot's KV: whatever the engine does with
its blocks, a token with valid KV has a valid seed. A KV connector moves the seeds as further layers of the
cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LatentMemory:
    """The seeds for one engine's KV cache, and counters of latent steps.

    Attributes:
        width: values of a seed.
        dtype: dtype of a seed.
        steps: number of latent steps computed so far.
        seconds: time spent on them.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = width
        self.dtype = dtype
        self._device = device
        self._seeds: torch.Tensor | None = None
        self._mixtures: dict[int, tuple[Sequence[int], Sequence[float]]] = {}
        self.steps = 0
        self.seconds = 0.0

    def layers_like(self, kv: torch.Tensor, block_size: int) -> list[torch.Tensor]:
        """Allocate the seeds and return them as further layers of the KV cache.

        Args:
            kv: KV cache of any layer, `[blocks, ...]`.

        Returns:
            Layers of uint8 `[blocks, bytes]`, with as many bytes a block as `kv`; as many as the seeds need.
        """
        block_bytes = kv[0].numel() * kv.element_size()
        seed_bytes = block_size * self.width * self.dtype.itemsize
        count = -(-seed_bytes // block_bytes)
        pool = torch.zeros(kv.shape[0], count * block_bytes, dtype=torch.uint8, device=self._device)
        seeds = pool.view(self.dtype)[:, : block_size * self.width]
        self._seeds = seeds.unflatten(1, (block_size, self.width))
        return list(pool.split(block_bytes, dim=1))

    def counts(self) -> dict[str, float]:
        """Return the counters `steps` and `seconds`, for the connector's statistics."""
        return {"steps": self.steps, "seconds": self.seconds}

    def require(self, kv: torch.Tensor, block_size: int) -> None:
        """Allocate the seeds unless a connector has."""
        if self._seeds is None:
            self.layers_like(kv, block_size)

    def mix(self, mixtures: dict[int, tuple[Sequence[int], Sequence[float]]]) -> None:
        """Set mixtures of token embeddings as inputs of the next forward pass; those before are forgotten.

        Args:
            mixtures: token ids and the weight of each, by the slot of a context's first token.
        """
        self._mixtures = mixtures

    def take_mixtures(
        self, slots: torch.Tensor, first: torch.Tensor
    ) -> dict[int, tuple[Sequence[int], Sequence[float]]]:
        """Take the mixtures for a batch, by the index of their tokens.

        Args:
            slots: the tokens' slots, int64 `[tokens]`.
            first: whether each token is the first one of its context, `[tokens]`.
        """
        if not self._mixtures:
            return {}
        begins = ((index, int(slots[index])) for index in first.nonzero().flatten().tolist())
        return {index: self._mixtures.pop(slot) for index, slot in begins if slot in self._mixtures}

    def write(self, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        """Write the seeds of tokens.

        Args:
            slots: the tokens' slots, int64 `[tokens]`.
            hidden: their last hidden states, `[tokens, width]`.
        """
        assert self._seeds is not None
        block_size = self._seeds.shape[1]
        self._seeds[slots // block_size, slots % block_size] = hidden

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the seeds `[tokens, width]` in these slots, int64 `[tokens]`."""
        assert self._seeds is not None
        block_size = self._seeds.shape[1]
        return self._seeds[slots // block_size, slots % block_size]
