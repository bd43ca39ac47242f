"""The thread that builds an engine: a stop meanwhile does not wait for the build."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from baton.engines.vllm import engine_thread as thread_module
from baton.engines.vllm.engine_thread import EngineThread


@pytest.mark.fault("A11")
@pytest.mark.parametrize("has_a_core", [False, True])
def test_a_build_is_broken_off(monkeypatch: pytest.MonkeyPatch, has_a_core: bool) -> None:
    """Before there is a process it is interrupted; after that its processes are killed, and it gives up."""
    core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) if has_a_core else None
    begun = threading.Event()

    def build(*_: Any, **__: Any) -> None:
        begun.set()
        while core is None or core.poll() is None:
            time.sleep(0.01)
        raise RuntimeError("the core is gone")

    monkeypatch.setattr(AsyncLLM, "from_engine_args", build)
    monkeypatch.setattr(
        thread_module.multiprocessing,
        "active_children",
        lambda: [core] if core is not None and begun.is_set() else [],
    )
    thread = EngineThread(None, None, "a")  # type: ignore[arg-type]  # nothing is built
    thread.start()
    assert begun.wait(20)
    asyncio.run(asyncio.wait_for(thread.end(), 20))
    assert not thread.is_alive()
    assert core is None or core.poll() is not None
    assert isinstance(thread.built.exception(), RuntimeError if has_a_core else SystemExit)
