"""Let an engine's connector move KV, which needs the engine's model."""

from __future__ import annotations

import structlog
from vllm.v1.engine.async_llm import AsyncLLM

NO_HANDOFFS = "it is configured without `handoff`, or with a `worker_extension_cls` of its own"


async def enable_moves(client: AsyncLLM) -> str | None:
    """Enable moves in a running engine; return why it cannot move KV, or None if it can."""
    try:
        answers: list[str | None] = await client.collective_rpc("baton_enable_moves")
    except Exception as error:  # noqa: BLE001  # the border to the worker: without moves it still serves
        structlog.get_logger("baton.engine").error("moves_not_enabled", exc_info=error)
        return "its worker failed when it was asked; the log says more"
    return next((answer for answer in answers if answer is not None), None)
