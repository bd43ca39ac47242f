"""Let an engine's connector move KV, which needs the engine's model."""

from __future__ import annotations

from vllm.v1.engine.async_llm import AsyncLLM

NO_HANDOFFS = "it is configured without `handoff`, or with a `worker_extension_cls` of its own"


async def enable_moves(client: AsyncLLM) -> str | None:
    """Enable moves in a running engine; return why it cannot move KV, or None if it can."""
    answers: list[str | None] = await client.collective_rpc("baton_enable_moves")
    return next((answer for answer in answers if answer is not None), None)
