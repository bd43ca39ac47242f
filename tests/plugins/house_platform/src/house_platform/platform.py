"""The platform: vLLM asks it for everything that depends on the device, in each of an engine's processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK_SIZE = 64
"""The CPU's own default is 128."""


class HousePlatform(CpuPlatform):
    """A CPU whose KV blocks are half as long."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        if not vllm_config.cache_config.user_specified_block_size:
            vllm_config.cache_config.block_size = BLOCK_SIZE
