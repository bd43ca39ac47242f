"""The two projections and the seeds, without an engine."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton_latent.memory import LatentMemory
from baton_latent.projection import (
    TiedProjection,
    UntiedProjection,
    VocabularyShard,
    mean_length,
    realignment,
)


def test_a_tied_model_takes_the_embedding_it_expects() -> None:
    embedding = torch.eye(4) * 3
    project = TiedProjection(embedding, 1.0, lambda hidden: hidden @ embedding.T)
    (sure,) = project(torch.tensor([[0.0, 50.0, 0.0, 0.0]]))
    assert torch.allclose(sure, torch.tensor([0.0, 3.0, 0.0, 0.0]), atol=1e-5)
    (torn,) = project(torch.tensor([[7.0, 7.0, -50.0, -50.0]]))
    assert torn[0] == torn[1] > 2
    assert float(torn.norm()) == pytest.approx(3.0)


def test_a_scaled_embedding_gives_scaled_inputs() -> None:
    embedding = torch.randn(50, 8)
    plain = TiedProjection(embedding, 1.0, lambda hidden: hidden @ embedding.T)
    scaled = TiedProjection(embedding, 4.0, lambda hidden: hidden @ embedding.T)
    hidden = torch.randn(3, 8)
    assert torch.allclose(scaled(hidden), plain(hidden) * 4)


@pytest.mark.parametrize("rows", [100, 8192 * 2 + 5])
def test_an_untied_model_s_head_is_mapped_onto_its_embedding(rows: int) -> None:
    torch.manual_seed(0)
    head, wanted = torch.randn(rows, 16), torch.randn(16, 16)
    found = realignment(head @ wanted, head)
    assert torch.allclose(found, wanted, atol=1e-3)
    solved = torch.linalg.lstsq(head, head @ wanted).solution
    assert torch.allclose(found, solved, atol=1e-3)


def test_what_an_untied_model_takes_is_as_long_as_its_embeddings() -> None:
    embedding, head = torch.randn(100, 16), torch.randn(100, 16)
    inputs = UntiedProjection(embedding, head, 1.0)(torch.randn(5, 16).bfloat16())
    assert inputs.dtype is torch.bfloat16
    assert inputs.float().norm(dim=1).tolist() == pytest.approx([mean_length(embedding)] * 5, rel=0.01)


class Ranks:
    """Two threads that add up a tensor, as the processes of a tensor-parallel model do."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._parts: dict[int, torch.Tensor] = {}

    def share(self, rank: int, first: int) -> VocabularyShard:
        def all_reduce(part: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = part
            self._barrier.wait(10)
            total = self._parts[0] + self._parts[1]
            self._barrier.wait(10)
            return total

        return VocabularyShard(first, all_reduce)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("first", [37, 90])
def test_a_vocabulary_in_two_shares_projects_as_one(tied: bool, first: int) -> None:
    torch.manual_seed(0)
    embedding, head, hidden = torch.randn(100, 16), torch.randn(100, 16), torch.randn(5, 16)
    ranks = Ranks()

    def logits(states: torch.Tensor) -> torch.Tensor:
        return states @ embedding.T

    def one(rank: int) -> torch.Tensor:
        rows = slice(0, first) if rank == 0 else slice(first, 100)
        share = ranks.share(rank, rows.start)
        if tied:
            return TiedProjection(embedding[rows], 2.0, logits, share)(hidden)
        return UntiedProjection(embedding[rows], head[rows], 2.0, share)(hidden)

    whole = (TiedProjection(embedding, 2.0, logits) if tied else UntiedProjection(embedding, head, 2.0))(
        hidden
    )
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(one, range(2)):
            assert torch.allclose(found, whole, atol=1e-5)


@pytest.mark.parametrize(("width", "kv_shape"), [(16, (6, 2, 4, 8)), (64, (6, 1, 4, 4)), (8, (3, 4, 4, 32))])
def test_seeds_lie_in_layers_as_large_as_the_kv_s(width: int, kv_shape: tuple[int, ...]) -> None:
    kv = torch.zeros(kv_shape)
    memory = LatentMemory(width, torch.float32, torch.device("cpu"))
    layers = memory.layers_like(kv, block_size=4)
    assert {layer.shape for layer in layers} == {(kv_shape[0], kv[0].numel() * 4)}
    slots = torch.tensor([9, 3, 4 * kv_shape[0] - 1])
    hidden = torch.randn(3, width)
    memory.write(slots, hidden)
    assert torch.equal(memory.read(slots), hidden)
    moved = [layer[2].clone() for layer in layers]  # a block goes elsewhere, as bytes
    for layer, data in zip(layers, moved, strict=True):
        layer[1] = data
    assert torch.equal(memory.read(torch.tensor([5])), hidden[:1])


def test_a_slot_that_is_written_again_forgets() -> None:
    memory = LatentMemory(4, torch.float32, torch.device("cpu"))
    memory.require(torch.zeros(2, 1, 4, 8), 4)
    slot = torch.tensor([5])
    for _ in range(2):
        seed = torch.randn(1, 4)
        memory.write(slot, seed)
        assert torch.equal(memory.read(slot), seed)
