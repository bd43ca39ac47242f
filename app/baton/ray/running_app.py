"""Run an app's lifespan in a task of its own."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI


class RunningApp:
    """The gateway's app, started and stopped in one task, as its lifespan's cancel scopes must be.

    Args:
        app: from `create_app`.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._begun = asyncio.Event()
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Enter the lifespan, and wait until all engines have started.

        Raises:
            BatonError: an engine cannot run.
        """
        self._task = asyncio.create_task(self._run(), name="gateway")
        begun = asyncio.create_task(self._begun.wait())
        await asyncio.wait({self._task, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._task.done():
            self._task.result()
        try:
            await self.app.state.started
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Leave the lifespan: stop the engines, close everything."""
        self._end.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        async with self.app.router.lifespan_context(self.app):
            self._begun.set()
            await self._end.wait()
