"""Runs in the engine's worker (`worker_extension_cls`): notes what each layer writes into the KV pool, by slot."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention


class Probe:
    """Keys, values and seeds of requests, read where the engine keeps them."""

    model_runner: Any
    rank: int

    def watch(self, what: str = "keys") -> None:
        """From now on note which blocks a request has, and keys and values as they are written.

        With `seeds` not those: a hook of ours is no part of what was compiled.
        """
        self.layers = {
            name: layer
            for name, layer in self.model_runner.compilation_config.static_forward_context.items()
            if isinstance(layer, Attention)
        }
        self.written: dict[str, torch.Tensor] = {}
        self.blocks: dict[str, list[int]] = {}
        self.left: dict[str, dict[str, Any]] = {}
        self.resumed: set[str] = set()
        for name, layer in self.layers.items() if what == "keys" else ():
            layer.register_forward_pre_hook(self._hook(name), with_kwargs=True)
        execute = self.model_runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            for name in scheduler_output.finished_req_ids & self.blocks.keys():
                self.left[name] = self._read(self.blocks[name])  # before others write into its blocks
            self.resumed |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
            answer = execute(scheduler_output, *args, **kwargs)
            for name, request in self.model_runner.requests.items():
                self.blocks[name] = list(request.block_ids[0])
            return answer

        self.model_runner.execute_model = execute_model

    def dump(self, request: str, path: str) -> None:
        """Write `keys` and `values` `[layers, slots, KV heads, head size]` and `seeds` of a request's blocks.

        And whether it was `resumed`, after it had been preempted. Of several processes the first one writes.
        """
        name = next(name for name in self.blocks if name.split("-")[0] == request)
        found = self.left.get(name) or self._read(self.blocks[name])
        if self.rank == 0:
            torch.save(found | {"resumed": name in self.resumed}, path)

    def require_compiled(self) -> None:
        """Return whether the model's layers run as `torch.compile` made them."""
        assert self.model_runner.model.model.compiled

    def _read(self, blocks: list[int]) -> dict[str, Any]:
        size = next(iter(self.layers.values())).kv_cache.shape[2]
        slots = torch.tensor([block * size + place for block in blocks for place in range(size)])
        memory = self.model_runner.compilation_config.static_forward_context.get("baton_latent.memory")
        both = [self.written[layer][:, slots] for layer in self.layers if layer in self.written]
        found = {"seeds": None if memory is None else memory.read(slots)}
        if both:
            found["keys"], found["values"] = torch.stack(both, dim=1)
        return found

    def _hook(self, name: str) -> Any:
        def note(layer: Any, args: Any, kwargs: Any) -> None:
            context = get_forward_context()
            if not context.attn_metadata:
                return
            slots = context.slot_mapping[name]
            names = ("query", "key", "value")
            given = dict(zip(names, args, strict=False)) | kwargs
            shape = (layer.kv_cache.shape[0] * layer.kv_cache.shape[2], layer.num_kv_heads, layer.head_size)
            if name not in self.written:
                self.written[name] = torch.zeros(2, *shape)
            for place, kind in enumerate(("key", "value")):
                self.written[name][place, slots] = given[kind][: len(slots)].view(-1, *shape[1:]).float()

        return note
