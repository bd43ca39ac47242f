"""Extend vLLM's worker by methods through which the gateway reaches the connector, as vLLM has none.

Set `worker_extension_cls` to `baton_kv.extension.BatonWorker`, and call `baton_enable_moves` by
`collective_rpc` when the engine has started.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from baton_kv.connector import BatonConnector
from baton_kv.stores.tree import KEY


class BatonWorker:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def baton_enable_moves(self) -> str | None:
        """Enable moves of KV of several entries into one context; return why KV cannot be moved, or None."""
        connector = get_kv_transfer_group()
        if not isinstance(connector, BatonConnector):
            return "the engine has another KV connector"
        return connector.enable_moves(self.model_runner.get_model())

    def baton_warm(self, key: str) -> dict[str, Any] | None:
        """Bring an entry into the worker's memory, in the background; a `Warmed`, None: it is still at work.

        Raises:
            ValueError: the engine has another KV connector, or the key is none.
        """
        connector = get_kv_transfer_group()
        if not isinstance(connector, BatonConnector) or KEY.fullmatch(key) is None:
            raise ValueError("baton_kv: the engine has another KV connector, or the key is none")
        return connector.warm(key)
