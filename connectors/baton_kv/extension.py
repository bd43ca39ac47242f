"""Extend vLLM's worker by a method that passes the engine's model to the connector, as vLLM does not.

Set `worker_extension_cls` to `baton_kv.extension.BatonWorker`, and call `baton_enable_moves` by
`collective_rpc` when the engine has started.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from baton_kv.connector import BatonConnector


class BatonWorker:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def baton_enable_moves(self) -> str | None:
        """Enable moves of KV of several entries into one context; return why KV cannot be moved, or None."""
        connector = get_kv_transfer_group()
        if not isinstance(connector, BatonConnector):
            return "the engine has another KV connector"
        return connector.enable_moves(self.model_runner.get_model())
