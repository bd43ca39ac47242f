"""Where moves of KV meet vLLM: how blocks are packed, how keys are rotated, what a forward pass needs."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import vllm
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

from baton_kv import engine_facts
from baton_kv.extension import BatonWorker
from baton_kv.joins import supported
from baton_kv.joins.packing import AMX, PLAIN, Packings, PackingUnknown, SlabPacking
from baton_kv.joins.rotation import Rotation
from baton_kv.joins.supported import MovesUnsupported

BLOCK, HEADS, SIZE = 32, 2, 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def isa_of(dtype: torch.dtype) -> str:
    return str(cpu_attn._get_attn_isa(dtype, BLOCK, SIZE, "auto"))


def written(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write as an attention layer of vLLM does."""
    blocks, heads, size, _ = cache.shape
    halves = cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa_of(cache.dtype))


def learned(dtype: torch.dtype) -> SlabPacking:
    return supported._learn(SimpleNamespace(head_size=SIZE, dtype=dtype, isa=isa_of(dtype)), BLOCK)


def in_words(cache: torch.Tensor) -> Any:
    """The slabs of a cache, `[blocks, heads, values of a slab]`."""
    words = cache.view(torch.int16).numpy() if cache.element_size() == 2 else cache.numpy()
    kind = {torch.bfloat16: "u2", torch.float16: "f2", torch.float32: "f4"}[cache.dtype]
    return words.view(kind).reshape(*cache.shape[:2], -1)


BY_AMX = """
import sys, torch
torch.ops.load_library(sys.argv[1])
for dtype in (torch.bfloat16, torch.float16):
    for tokens, size in ((32, 32), (32, 64), (128, 64), (64, 96), (128, 128), (32, 256)):
        torch.manual_seed(tokens + size)
        keys, values = torch.randn(2, 2 * tokens, 3, size).to(dtype)
        for isa in ("vec", "amx"):
            cache = torch.zeros(2, 3, tokens, 2 * size, dtype=dtype)
            halves = cache.view(2, 3, 2 * tokens, -1).chunk(2, dim=2)
            slots = torch.arange(2 * tokens)
            write = torch.ops._C.cpu_attn_reshape_and_cache
            write(keys, values, *halves, slots, isa, 1.0, 1.0, "auto")
            sys.stdout.buffer.write(cache.view(torch.uint8).numpy().tobytes())
"""
"""Writes what vLLM's library for machines with AMX packs: it can on every one with AVX-512."""


@pytest.mark.fault("B28")
def test_what_a_machine_with_amx_packs_is_brought_into_this_one_s_order_and_back() -> None:
    """Proved against the backend's own function, byte by byte, for six shapes of blocks in two dtypes."""
    library = Path(vllm.__file__).parent / "_C.abi3.so"
    command = [sys.executable, "-c", BY_AMX, str(library)]
    ran = subprocess.run(command, capture_output=True, timeout=120)
    if ran.returncode < 0:
        pytest.skip("this processor cannot run vLLM's library for AMX, even where it needs none")
    assert ran.returncode == 0, ran.stderr.decode()
    written, compared = memoryview(ran.stdout), 0
    for dtype in (torch.bfloat16, torch.float16):
        for tokens, size in ((32, 32), (32, 64), (128, 64), (64, 96), (128, 128), (32, 256)):
            length = 2 * 3 * tokens * 2 * size * 2
            plain, amx, written = written[:length], written[length : 2 * length], written[2 * length :]
            for name, given, wanted in ((PLAIN, amx, plain), (AMX, plain, amx)):
                own = SlabPacking.known(name, tokens, size, dtype)
                packings = Packings.of([own])
                assert packings is not None
                slabs = memoryview(bytearray(given))
                packings.repack(0, slabs, AMX if name == PLAIN else PLAIN)
                assert slabs == wanted, (name, dtype, tokens, size)
                compared += length
    assert not len(written)
    print(f"\nB28: {compared} bytes compared, 0 wrong")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_this_machine_s_packing_is_one_that_is_known(dtype: torch.dtype, isa: str) -> None:
    found = supported._learn(SimpleNamespace(head_size=SIZE, dtype=dtype, isa=isa), BLOCK)
    assert found.name == PLAIN
    assert learned(dtype).name in (PLAIN, AMX)


@pytest.mark.fault("B28")
def test_an_engine_tells_how_it_packs_only_where_all_of_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its fingerprint has the instruction set, and nobody else's entries are read."""
    impl: Any = object.__new__(cpu_attn.CPUAttentionBackendImpl)
    impl.is_fp8_kv_cache = False
    layer = SimpleNamespace(impl=impl, dtype=torch.bfloat16, head_size=SIZE)
    layers: dict[str, Any] = {"a": layer, "b": layer}
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    cache = torch.zeros(4, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
    caches = {"a": cache, "latent.0": torch.zeros(4, 1, BLOCK, 8), "b": cache}
    found = engine_facts.packings_of(config, caches)
    assert found is not None
    assert (found.name, found.layers[1]) == (learned(torch.bfloat16).name, None)
    assert [each.tokens for each in found.layers if each is not None] == [BLOCK, BLOCK]

    def refused(**others: Any) -> bool:
        layers["b"] = SimpleNamespace(**vars(layer) | others)
        try:
            return engine_facts.packings_of(config, caches) is None
        finally:
            layers["b"] = layer

    quantised: Any = object.__new__(cpu_attn.CPUAttentionBackendImpl)
    quantised.is_fp8_kv_cache = True
    assert refused(impl=quantised)
    assert refused(impl=object())
    assert refused(head_size=32)
    assert refused(dtype=torch.float16)
    with monkeypatch.context() as patched:
        patched.setattr(SlabPacking, "known", lambda *_: None)
        assert engine_facts.packings_of(config, caches) is None
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", lambda *_: None)
    assert engine_facts.packings_of(config, caches) is None, "a backend that writes nothing where it should"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_backend_packs_is_read_and_packed_the_same_way(dtype: torch.dtype) -> None:
    packing = learned(dtype)
    torch.manual_seed(1)
    keys, values = torch.randn(2, 2 * BLOCK, HEADS, SIZE).to(dtype)
    cache = torch.zeros(2, HEADS, BLOCK, 2 * SIZE, dtype=dtype)
    written(keys, values, cache, torch.arange(2 * BLOCK))
    slabs = in_words(cache).swapaxes(0, 1)
    found, kept = packing.unpack(slabs)
    assert numpy.array_equal(found, keys.permute(1, 0, 2).float().numpy())
    again = torch.zeros_like(cache)
    for block, (first, count) in enumerate(((0, BLOCK), (0, BLOCK))):
        part = slice(block * BLOCK, block * BLOCK + count)
        packing.pack(in_words(again)[block], first, found[:, part], kept[:, part])
    assert torch.equal(again, cache)
    partly = torch.zeros_like(cache)
    packing.pack(in_words(partly)[0], 5, found[:, 5:20], kept[:, 5:20])
    expected = torch.zeros_like(cache)
    written(keys[5:20], values[5:20], expected, torch.arange(5, 20))
    assert torch.equal(partly, expected)


def test_a_backend_that_changes_what_it_stores_is_refused() -> None:
    def halved(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
        cache.copy_(torch.cat([keys, values], dim=-1).transpose(0, 1)[None] // 2)

    with pytest.raises(PackingUnknown):
        SlabPacking.learn(BLOCK, SIZE, torch.float32, halved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("rotated", [SIZE, SIZE // 2])
@pytest.mark.parametrize("by_values", [True, False])
def test_keys_are_rotated_as_vllm_would_have(
    dtype: torch.dtype, halves: bool, rotated: int, by_values: bool
) -> None:
    with set_current_vllm_config(VllmConfig()):
        embedding = RotaryEmbedding(SIZE, rotated, 512, 10000.0, halves, dtype)
    torch.manual_seed(2)
    plain = torch.randn(40, HEADS * SIZE).to(dtype)

    def at(begin: int) -> Any:
        positions, query = torch.arange(begin, begin + 40), plain.clone()
        _, keys = embedding.forward_native(positions, query, plain.clone())
        return keys.view(40, HEADS, SIZE).permute(1, 0, 2).float().numpy()

    rotation = supported._rotation(
        torch.nn.ModuleList([embedding]),
        SIZE,
        SimpleNamespace(model_config=SimpleNamespace(max_model_len=512, dtype=dtype)),  # type: ignore[arg-type]  # what it reads of it
        by_values=by_values,
    )
    keys = numpy.ascontiguousarray(at(3))
    rotation.apply(keys, rotation.turn(3, 301, 40))
    # Rounded once more than what vLLM computes at once.
    assert keys == pytest.approx(at(301), abs={torch.float32: 1e-5, torch.bfloat16: 6e-2}.get(dtype, 8e-3))


def test_a_rotation_by_nothing_changes_nothing() -> None:
    angles = numpy.random.default_rng(3).uniform(0, 6, (64, 16))
    rotation = Rotation(numpy.hstack([numpy.cos(angles), numpy.sin(angles)]).astype("f4"), halves=True)
    keys = numpy.random.default_rng(4).normal(size=(2, 20, 32)).astype("f4")
    before = keys.copy()
    rotation.apply(keys, rotation.turn(7, 7, 20))
    assert keys == pytest.approx(before, abs=1e-6)


def plain_layer(**changes: Any) -> Any:
    impl = object.__new__(cpu_attn.CPUAttentionBackendImpl)
    usual = {
        "sliding_window": -1, "sinks": None, "alibi_slopes": None, "kv_sharing_target_layer_name": None,
        "is_fp8_kv_cache": False, "num_heads": 4, "num_kv_heads": 2, "head_size": SIZE,
    }  # fmt: skip
    vars(impl).update(usual | changes)
    return SimpleNamespace(impl=impl)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 64}, "sliding windows"),
        ({"sinks": torch.zeros(2)}, "attention sinks"),
        ({"alibi_slopes": torch.zeros(2)}, "rotary positions"),
        ({"kv_sharing_target_layer_name": "layer.0"}, "share KV"),
        ({"is_fp8_kv_cache": True}, "quantized"),
        ({"num_kv_heads": 1}, "differ in their heads"),
    ],
)
def test_layers_whose_kv_is_more_than_their_own_keys_and_values_are_refused(
    changes: dict[str, Any], reason: str
) -> None:
    supported._require_plain_attention({"a": plain_layer(), "b": plain_layer()})
    with pytest.raises(MovesUnsupported, match=reason):
        supported._require_plain_attention({"a": plain_layer(), "b": plain_layer(**changes)})


def test_layers_have_what_is_read_of_them() -> None:
    source = inspect.getsource(cpu_attn.CPUAttentionBackendImpl.__init__)
    for name in (
        "sliding_window",
        "sinks",
        "alibi_slopes",
        "kv_sharing_target_layer_name",
        "is_fp8_kv_cache",
    ):
        assert f"self.{name} =" in source, name


class Other(RotaryEmbedding):
    """A rotation of another kind, such as M-RoPE's."""


def test_other_position_embeddings_are_refused() -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64, dtype=torch.float32))
    with set_current_vllm_config(VllmConfig()):
        plain = RotaryEmbedding(SIZE, SIZE, 64, 10000.0, True, torch.float32)
        faster = RotaryEmbedding(SIZE, SIZE, 64, 500.0, True, torch.float32)
        other = Other(SIZE, SIZE, 64, 10000.0, True, torch.float32)
    assert supported._rotation(torch.nn.ModuleList([plain]), SIZE, config, by_values=False).positions == 64
    for modules in ([], [other], [plain, faster]):
        with pytest.raises(MovesUnsupported):
            supported._rotation(torch.nn.ModuleList(modules), SIZE, config, by_values=False)
    config.model_config.max_model_len = 65
    with pytest.raises(MovesUnsupported, match="too short"):
        supported._rotation(torch.nn.ModuleList([plain]), SIZE, config, by_values=False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel_config": SimpleNamespace(tensor_parallel_size=2)}, "tensor parallelism"),
        ({"speculative_config": object()}, "speculative"),
        ({"lora_config": object()}, "LoRA"),
        ({"rows_a_block": 2}, "split"),
    ],
)
def test_engines_whose_kv_is_elsewhere_too_are_refused(changes: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {"parallel_config": SimpleNamespace(tensor_parallel_size=1)}
    given |= dict.fromkeys(("speculative_config", "lora_config"))
    rows = changes.pop("rows_a_block", 1)
    config: Any = SimpleNamespace(**given | changes)
    with pytest.raises(MovesUnsupported, match=reason):
        supported._require_plain(config, rows)


def test_every_argument_of_the_scheduler_s_metadata_is_given() -> None:
    source = inspect.getsource(supported.GapForward._metadata)
    for name in inspect.signature(ops.cpu_attn_get_scheduler_metadata).parameters:
        assert f"{name}=" in source, name


def test_the_metadata_and_the_context_have_the_fields_that_are_set() -> None:
    fields = {field.name for field in dataclasses.fields(cpu_attn.CPUAttentionMetadata)}
    assert {"block_table", "slot_mapping", "seq_lens", "query_start_loc", "scheduler_metadata"} <= fields
    assert {"slot_mapping", "skip_compiled"} <= set(inspect.signature(set_forward_context).parameters)


def test_vllm_can_add_our_methods_to_its_worker() -> None:
    """It refuses an extension whose methods it has itself."""
    ours = [name for name in dir(BatonWorker) if not name.startswith("__")]
    assert ours == ["baton_enable_moves", "baton_warm"]
    assert not any(hasattr(WorkerBase, name) for name in ours)
    assert callable(GPUModelRunner.get_model)
