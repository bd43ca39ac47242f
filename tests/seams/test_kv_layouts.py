"""KV is moved by head and block through vLLM's own views, whatever lies in memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)

from baton_kv.blocks import HeadShard, KVBlocks
from baton_kv.copies import HostStaging

BLOCKS, LAYERS, BLOCK = 9, 3, 32
TAKEN, GIVEN = [5, 2, 7, 1], [8, 0, 3, 4]
SPECS = {
    "float32": FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=torch.float32),
    "bfloat16": FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=torch.bfloat16),
    "fp8": FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=4,
        head_size=16,
        dtype=torch.float8_e4m3fn,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
    ),
    "MLA": MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16),
    "padded": FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=torch.bfloat16, page_size_padded=10240
    ),
}
Spec = FullAttentionSpec | MLAAttentionSpec


def views_of(spec: Spec, layout: KVCacheLayout, kernel: int | None) -> list[torch.Tensor] | None:
    """The layers as vLLM's worker gives them to a connector; None where vLLM has no such layout."""
    try:
        layer, block, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
        raw = torch.zeros(max(layer * LAYERS, block * BLOCKS), dtype=torch.int8)
        names = [f"layer.{number}" for number in range(LAYERS)]
        tensor = KVCacheTensor(size=raw.numel(), layers=names, layer_stride=layer, block_stride=block)
        return list(create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel))
    except (AssertionError, ValueError):
        return None


def fill(views: list[torch.Tensor], seed: int) -> list[bytes]:
    """Write random KV through vLLM's own views; return it by layer and head, every block's tokens in order."""
    generator = torch.Generator().manual_seed(seed)
    written = []
    for view in views:
        size = view.shape[-1] * view.element_size()
        shape = (
            view.shape[1],
            BLOCKS,
            view.shape[0] // BLOCKS,
            view.shape[2],
            size,
        )  # head, block, row, token
        kv = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        for head, block, row in itertools.product(*map(range, shape[:3])):
            view[block * shape[2] + row, head].view(torch.uint8).copy_(kv[head, block, row])
        written += [kv[head].numpy().tobytes() for head in range(shape[0])]
    return written


def kv_in(blocks: KVBlocks, ids: list[int]) -> list[bytes]:
    return [
        b"".join(bytes(slab) for slab in HostStaging().gather(blocks.pool(layer, range(head, head + 1)), ids))
        for layer in range(len(blocks))
        for head in blocks.heads(layer)
    ]


@pytest.mark.parametrize("name", SPECS)
def test_every_layout_gives_the_same_bytes(name: str) -> None:
    """A slab holds a head's tokens in order; so an entry of one layout is one of any other."""
    tried = []
    for layout, kernel in itertools.product(KVCacheLayout, (None, 16)):
        views = views_of(SPECS[name], layout, kernel)
        if views is None:
            continue
        blocks = KVBlocks(views, BLOCKS)
        written = fill(views, 1)
        steps = [shape.slab_bytes for shape in blocks.shapes for _ in range(shape.heads)]
        expected = [
            b"".join(kv[block * step : (block + 1) * step] for block in TAKEN)
            for kv, step in zip(written, steps, strict=True)
        ]
        assert kv_in(blocks, TAKEN) == expected, layout
        tried.append((layout.name, kernel))
    print(f"\n{name}: {len(tried)} layouts")
    assert len(tried) >= 2


@given(
    name=st.sampled_from(sorted(SPECS)),
    layouts=st.tuples(st.sampled_from(list(KVCacheLayout)), st.sampled_from(list(KVCacheLayout))),
    kernels=st.tuples(st.sampled_from([None, 16]), st.sampled_from([None, 16])),
    taken=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_what_goes_from_one_layout_to_another_arrives_and_changes_nothing_else(
    name: str,
    layouts: tuple[KVCacheLayout, KVCacheLayout],
    kernels: tuple[int | None, int | None],
    taken: list[int],
    seed: int,
) -> None:
    views = [views_of(SPECS[name], layout, kernel) for layout, kernel in zip(layouts, kernels, strict=True)]
    assume(views[0] is not None and views[1] is not None)
    assert views[0] is not None
    assert views[1] is not None
    source, target = KVBlocks(views[0], BLOCKS), KVBlocks(views[1], BLOCKS)
    fill(views[0], seed)
    fill(views[1], seed + 1)
    given_to = list(reversed(range(BLOCKS)))[: len(taken)]
    others = [block for block in range(BLOCKS) if block not in given_to]
    before = kv_in(target, others)
    for layer in range(LAYERS):
        heads = source.heads(layer)
        data = b"".join(bytes(slab) for slab in HostStaging().gather(source.pool(layer, heads), taken))
        HostStaging().scatter(target.pool(layer, heads), given_to, memoryview(data))
    assert kv_in(target, given_to) == kv_in(source, taken)
    assert kv_in(target, others) == before


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_s_heads_are_the_model_s(ranks: int) -> None:
    """vLLM gives a rank the heads from `rank * count` on: the same bytes as those heads of one rank alone."""
    whole_views = views_of(SPECS["bfloat16"], KVCacheLayout.LBHNC, None)
    assert whole_views is not None
    whole = KVBlocks(whole_views, BLOCKS)
    fill(whole_views, 3)
    for rank in range(ranks):
        shard = HeadShard.of_rank(4, rank, ranks)
        own = [view[:, shard.first : shard.first + shard.count] for view in whole_views]
        held = KVBlocks(own, BLOCKS, shard)
        assert held.shapes == whole.shapes
        for layer in range(LAYERS):
            assert list(map(bytes, HostStaging().gather(held.pool(layer, shard.heads), GIVEN))) == list(
                map(bytes, HostStaging().gather(whole.pool(layer, shard.heads), GIVEN))
            )
