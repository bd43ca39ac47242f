"""Where plugins' code runs: threads and loops that come back, whatever a plugin does to them."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import pytest
from support.plugin_gateways import notice_blocked_loops_soon

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.admission.fair_threads import FairThreads, WorkEscape
from baton.errors import PluginBusy
from baton.pooling.plugin import HookLoop


def hook_threads(places: int) -> FairThreads:
    """Threads as a plugin's synchronous hooks have them."""
    return FairThreads(FairQueue(QueueLimits(places), lambda _: PluginBusy()), "hook-x", may_hang=True)


async def idle(seconds: float = 0.0) -> str:
    await asyncio.sleep(seconds)
    return threading.current_thread().name


async def block(release: threading.Event) -> None:
    release.wait(60)  # what plugins do by mistake


async def until(condition: Any, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110  # of threads, which set no events
        await asyncio.sleep(0.01)
    return bool(condition())


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, SystemExit, KeyboardInterrupt])
async def test_what_no_future_can_hold_is_told_all_the_same(kind: type[BaseException]) -> None:
    """A `next` without a default in a hook must not leave its request waiting."""

    def hook() -> None:
        raise kind

    threads = hook_threads(1)
    for _ in range(3):
        with pytest.raises(WorkEscape):
            await asyncio.wait_for(threads.run("acme", hook), 20)
    assert await threads.run("acme", lambda: 7) == 7


async def test_a_cancel_that_meets_a_finished_hook_leaves_nobody_behind() -> None:
    """The count would never fall again, and in the end every request would be refused."""
    threads = hook_threads(2)
    over = threading.Event()
    task = asyncio.ensure_future(threads.run("acme", over.set))
    await asyncio.sleep(0)
    over.wait(20)
    time.sleep(0.05)  # noqa: ASYNC251  # the result is on its way to the loop, which is busy here
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert threads.left_behind == 0


async def test_a_hook_left_behind_is_counted_until_it_comes_back() -> None:
    """And no longer."""
    threads = hook_threads(1)
    begun, release = threading.Event(), threading.Event()

    def hook() -> None:
        begun.set()
        release.wait()

    task = asyncio.ensure_future(threads.run("acme", hook))
    assert await until(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert threads.left_behind == 1
    release.set()
    assert await until(lambda: threads.left_behind == 0)


async def test_a_blocked_loop_is_left_to_those_on_it_and_others_get_a_fresh_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those on it go on when it comes round; then its thread ends."""
    noticed_s = notice_blocked_loops_soon(monkeypatch)
    loop, release = HookLoop("x", 4), threading.Event()
    with loop.borrowed() as first:
        blocking = asyncio.ensure_future(first.run_here(block(release)))
        await asyncio.sleep(noticed_s)
        with loop.borrowed() as second:
            assert second is not first
            assert await second.run_here(idle())
            assert loop.stuck == 1
        release.set()
        await blocking
        assert await first.run_here(idle())
    assert await until(lambda: not first.is_alive())
    assert loop.stuck == 0
    loop.close()


async def test_stuck_loops_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like threads."""
    noticed_s = notice_blocked_loops_soon(monkeypatch)
    loop, release = HookLoop("x", 1), threading.Event()
    with loop.borrowed() as thread:
        blocking = asyncio.ensure_future(thread.run_here(block(release)))
        await asyncio.sleep(noticed_s)
        with pytest.raises(PluginBusy), loop.borrowed():
            pass
        release.set()
        await blocking
    assert await until(lambda: loop.stuck == 0)
    with loop.borrowed() as fresh:
        assert await fresh.run_here(idle())
    loop.close()


async def test_a_plugin_that_stops_its_loop_has_it_back() -> None:
    """And one whose own task ends the interpreter, elsewhere."""

    async def stop() -> None:
        asyncio.get_running_loop().stop()

    async def leave_the_interpreter() -> None:
        asyncio.get_running_loop().call_soon(sys.exit, 1)

    loop = HookLoop("x", 4)
    for harm in (stop, leave_the_interpreter):
        with loop.borrowed() as thread:
            await asyncio.wait_for(thread.run_here(harm()), 20)
            await asyncio.sleep(0.05)
            assert await asyncio.wait_for(thread.run_here(idle()), 20)
    loop.close()
    assert await until(lambda: not thread.is_alive())


@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, SystemExit])
async def test_a_coroutine_that_raises_what_ends_tasks_only_fails(kind: type[BaseException]) -> None:
    """A cancelled request looks the same, and is not."""

    async def hook() -> None:
        raise kind

    loop = HookLoop("x", 4)
    with loop.borrowed() as thread:
        with pytest.raises(WorkEscape):
            await thread.run_here(hook())
        task = asyncio.ensure_future(thread.run_here(idle(30)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    loop.close()
