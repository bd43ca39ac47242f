"""IO processors that do on purpose what plugins do by mistake; numbers in, their sum out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from baton.engines.engine import Plugin

SECRET = "/etc/secret-of-the-plugin"


class Refusal(ValueError):
    status = 422
    code = "too_cloudy"
    param = "data.clouds"


class Current:
    """As vLLM 0.32 wants them, with synchronous hooks only.

    `data` is `{"numbers": [...]}`; `{"in": hook, "do": deed}` makes the hook misbehave.

    Attributes:
        release: ends every deed that blocks, before its seconds are over.
    """

    def __init__(self) -> None:
        self.forgotten: list[str] = []
        self.threads: set[str] = set()
        self.files: dict[str, Path] = {}
        self.release = threading.Event()

    def deed(self, data: dict[str, Any], hook: str) -> Any:
        self.threads.add(threading.current_thread().name)
        if data.get("in") != hook:
            return None
        do = data["do"]
        if do == "raise":
            raise RuntimeError(f"cannot open {SECRET}")
        if do == "refuse":
            raise Refusal("more than half of the scene is clouds")
        if do == "value":
            raise ValueError("numbers: needs at least one")
        if do == "exit":
            raise SystemExit(3)
        if do == "block":
            self.release.wait(data["seconds"])
        return do

    def parse_data(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise ValueError("an object with numbers is needed")
        self.deed(data, "parse")
        return data

    def pre_process(self, prompt: dict[str, Any], request_id: str | None = None) -> Any:
        if self.deed(prompt, "pre") == "junk":
            return 7
        return [float(number) for number in prompt.get("numbers", [])]

    def post_process(self, model_output: list[Any], request_id: str | None = None) -> Any:
        return {
            "sum": sum(output.outputs for output in model_output),
            "order": [o.outputs for o in model_output],
        }

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


class Lazy(Current):
    """Makes prompts one by one.

    Attributes:
        made: how many prompts so far.
        closed: generators of prompts whose `finally` has run.
        kept: every generator, so that only `close` can end one early, never the garbage collector.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.closed = 0
        self.kept: list[Iterator[float]] = []

    def pre_process(self, prompt: dict[str, Any], request_id: str | None = None) -> Iterator[float]:
        self.kept.append(self._prompts(prompt))
        return self.kept[-1]

    def _prompts(self, prompt: dict[str, Any]) -> Iterator[float]:
        try:
            for number in prompt["numbers"]:
                self.made += 1
                self.deed(prompt, f"prompt {self.made}")
                yield float(number)
        finally:
            self.closed += 1


class Async(Current):
    """With coroutines of its own, that see outputs as they come.

    Attributes:
        closed: generators of prompts whose `finally` has run.
        kept: every generator, so that only `aclose` can end one early, never the garbage collector.
    """

    def __init__(self) -> None:
        super().__init__()
        self.closed = 0
        self.kept: list[AsyncIterator[float]] = []

    async def pre_process_async(
        self, prompt: dict[str, Any], request_id: str | None = None
    ) -> AsyncIterator[float]:
        self.deed(prompt, "pre")
        self.kept.append(self._prompts(prompt))
        return self.kept[-1]

    async def _prompts(self, prompt: dict[str, Any]) -> AsyncGenerator[float, None]:
        try:
            for number in prompt["numbers"]:
                await asyncio.sleep(0)
                yield float(number)
        finally:
            self.closed += 1

    async def post_process_async(
        self, model_output: AsyncGenerator[tuple[int, Any], None], request_id: str | None = None
    ) -> Any:
        self.threads.add(threading.current_thread().name)
        seen = [(index, output.outputs) async for index, output in model_output]
        return {"sum": sum(value for _, value in seen), "order": [index for index, _ in seen]}


class Swallowing(Async):
    """Goes on as if nothing had happened when the engine fails."""

    async def post_process_async(
        self, model_output: AsyncGenerator[tuple[int, Any], None], request_id: str | None = None
    ) -> Any:
        try:
            return [output async for output in model_output]
        except Exception:  # noqa: BLE001  # the mistake this plugin makes
            return "fine"


class Files(Current):
    """Takes files and gives files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.uploads: list[dict[str, Any]] = []

    def parse_upload(
        self, file: Path, media_type: str, query: dict[str, str], accept: tuple[str, ...]
    ) -> Any:
        content = file.read_bytes()
        self.uploads.append({"type": media_type, "query": query, "accept": accept, "size": len(content)})
        return {"numbers": [byte / 100 for byte in content[:4]]} | (
            {"in": "pre", "do": query["do"]} if "do" in query else {}
        )

    def output_to_response(self, output: Any) -> Any:
        return SimpleNamespace(data=output)

    def output_to_files(self, output: Any) -> list[tuple[str, str, Path]]:
        made = []
        for name, kind, content in (
            ("mask.tif", "image/tiff", f"sum {output['sum']:g}"),
            ("preview.png", "image/png", "a picture"),
        ):
            path = self.folder / f"{time.monotonic_ns()}-{name}"
            path.write_text(content)
            self.files[name] = path
            made.append((name, kind, path))
        return made

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        for path in self.files.values():
            path.unlink(missing_ok=True)
        self.files.clear()


class Classic:
    """As vLLM 0.11 to 0.15 wanted them."""

    def parse_request(self, request: Any) -> Any:
        return request["data"]

    def validate_or_generate_params(self, params: Any = None) -> Any:
        return {"task": "embed"}

    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return [float(number) for number in prompt["numbers"]]

    def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return sum(output.outputs for output in model_output)

    def output_to_response(self, plugin_output: Any) -> Any:
        return SimpleNamespace(request_id="theirs", created_at=0, data={"classic": plugin_output})


def plugin(instance: Any) -> Plugin:
    """As an engine would hand it to the gateway."""
    return Plugin(type(instance).__name__.lower(), instance, lambda body: body)
