"""The thread that builds an engine: a stop meanwhile does not wait for the build."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio
from vllm import envs
from vllm.model_executor.models import registry
from vllm.platforms import cpu
from vllm.renderers import BaseRenderer
from vllm.v1.engine import core_client, utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor, UniProcExecutor

from baton.engines.process.fork_server import CURRENT, ForkContext, Launch
from baton.engines.vllm import engine_thread as thread_module
from baton.engines.vllm.engine_thread import (
    Client,
    EngineThread,
    Resources,
    Starts,
    end_contexts_apart,
    fork_cores,
)

ARGS: Any = SimpleNamespace(
    create_engine_config=lambda _usage: None, enable_log_requests=False, disable_log_stats=True
)


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

    monkeypatch.setattr(AsyncLLM, "from_vllm_config", build)
    monkeypatch.setattr(thread_module, "with_core", lambda config: config)
    monkeypatch.setattr(
        thread_module.multiprocessing,
        "active_children",
        lambda: [core] if core is not None and begun.is_set() else [],
    )
    thread = EngineThread(ARGS, None, "a", Starts())  # type: ignore[arg-type]  # nothing is built
    thread.start()
    assert begun.wait(20)
    asyncio.run(asyncio.wait_for(thread.end(), 20))
    assert not thread.is_alive()
    assert core is None or core.poll() is not None
    assert isinstance(thread.built.exception(), RuntimeError if has_a_core else SystemExit)


@pytest.mark.fault("A11")
def test_a_client_whose_build_fails_is_ended_there_and_not_by_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That may run in the thread that warms up the processor of images, for which vLLM's `__del__` waits."""
    warming, collected = threading.Event(), threading.Event()

    def warm_up() -> None:
        warming.set()
        collected.wait(5)  # longer where it is this thread's work that waits for it
        gc.collect()

    class Renderer(BaseRenderer):  # type: ignore[type-arg,misc]
        def __init__(self) -> None:
            self._resources = contextlib.ExitStack()  # type: ignore[assignment]
            self._mm_warmup_future = pool.submit(warm_up)

        def render_messages(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    def build(self: Any, *_: Any, **__: Any) -> None:
        self.itself, self.renderer = self, Renderer()  # in a circle, as vLLM's client is
        assert warming.wait(20)
        raise RuntimeError("the core is gone")

    monkeypatch.setattr(AsyncLLM, "__init__", build)
    with ThreadPoolExecutor(1) as pool:
        threading.Timer(0.5, collected.set).start()
        with pytest.raises(RuntimeError, match="the core is gone"):
            Client()
        assert pool.submit(lambda: True).result(20), "its thread waits for itself"


@pytest.mark.fault("A11")
@pytest.mark.parametrize("forked", [False, True])
def test_builds_that_wait_for_their_turn_end_too(monkeypatch: pytest.MonkeyPatch, forked: bool) -> None:
    """A stop leaves the turn free and kills no engine but its own, whoever waited for it."""
    begun = threading.Event()

    def build(*_: Any, **__: Any) -> None:
        begun.set()
        while True:
            time.sleep(0.01)

    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", build)
    monkeypatch.setattr(thread_module, "with_core", lambda config: config)
    monkeypatch.setattr(thread_module.multiprocessing, "active_children", lambda: [other])
    starts = Starts()
    threads = [EngineThread(ARGS, None, name, starts, forked=forked) for name in "abc"]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    assert begun.wait(20)

    async def end() -> None:
        await asyncio.wait_for(asyncio.gather(*(thread.end() for thread in threads)), 20)

    try:
        asyncio.run(end())
        assert not any(thread.is_alive() for thread in threads)
        assert all(isinstance(thread.built.exception(), SystemExit) for thread in threads)
        assert not starts.turn.locked()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_vllm_starts_a_core_with_what_its_launch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam of the fork server: `launch_core_engines` asks `get_mp_context` of its own module."""
    monkeypatch.setattr(utils, "get_mp_context", utils.get_mp_context)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as the gateway has it
    fork_cores()
    assert "get_mp_context()" in inspect.getsource(utils.CoreEngineProcManager.__init__)
    assert type(utils.get_mp_context()).__name__ == "SpawnContext"
    token = CURRENT.set(Launch(None, lambda: None, lambda _core: None))  # type: ignore[arg-type]  # nothing is launched
    try:
        assert isinstance(utils.get_mp_context(), ForkContext)
    finally:
        CURRENT.reset(token)


@pytest.mark.fault("A30")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an error there, the socket would stay open
async def test_a_client_s_context_that_cannot_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket stays open that is garbage together with its context, which may be ended first."""
    monkeypatch.setattr(core_client, "BackgroundResources", core_client.BackgroundResources)
    end_contexts_apart()
    context = zmq.Context()
    shadow, other = zmq.asyncio.Context(context), zmq.Context(context)
    known, left = shadow.socket(zmq.PULL), other.socket(zmq.ROUTER)
    resources: Resources = core_client.BackgroundResources(
        ctx=context, output_socket=known, output_queue_task=asyncio.create_task(asyncio.sleep(600))
    )
    await asyncio.to_thread(resources)
    await asyncio.sleep(0.1)
    assert known.closed
    assert not context.closed
    (ending,) = [thread for thread in threading.enumerate() if thread.name == "zmq-context"]
    assert ending.is_alive()
    vars(other)["keeps"] = [other, context, left]
    del context, shadow, other, known, left, resources
    gc.collect()  # without the thread it never ended
    await asyncio.to_thread(ending.join, 5)
    assert not ending.is_alive()


def test_vllm_s_clients_close_what_they_hold_by_their_resources() -> None:
    """The seam of `Resources`: made by this name in its own module, called once, at a client's end."""
    made = inspect.getsource(core_client.MPClient.__init__)
    assert "self.resources = BackgroundResources(ctx=sync_ctx)" in made
    assert "self._finalizer = weakref.finalize(self, self.resources)" in made
    assert "if self._finalizer.detach() is not None:" in inspect.getsource(core_client.MPClient.shutdown)


def test_vllm_takes_the_executor_of_one_process_on_a_cpu() -> None:
    """Its platform replaces the string "uni", so that the class must stand for it."""
    source = inspect.getsource(cpu.CpuPlatform.check_and_update_config)
    assert 'distributed_executor_backend == "uni"' in source
    assert issubclass(UniProcExecutor, Executor)


def test_vllm_looks_at_a_model_s_class_in_another_process_for_cuda_s_sake_alone() -> None:
    source = inspect.getsource(registry._LazyRegisteredModel.inspect_model_cls)
    assert "Performed in another process to avoid initializing CUDA" in source
    assert "_run_in_subprocess(" in source


def test_environment_variables_are_read_anew_while_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sets some for the engine that it starts, and asks for others at every step of those that run."""
    starts = Starts()
    try:
        with starts.running():
            with starts.running():
                pass
            monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "7")
            assert envs.VLLM_MAX_N_SEQUENCES == 7
        monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "8")
        assert envs.VLLM_MAX_N_SEQUENCES == 7, "asked for again"
        with starts.running():
            assert envs.VLLM_MAX_N_SEQUENCES == 8
    finally:
        envs.disable_envs_cache()
