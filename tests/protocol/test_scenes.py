"""Scenes as jobs: state, files with ranges, keys that repeat nothing, budgets, ends of clients and gateways."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from geo.prithvi.published import SIX
from geo.raster.made import write_tiff
from geo.test_plugin import encoder, regression
from protocol.test_ways import SCENE, map_engine
from support.gateways import FakeGateway, Held, run_fake
from support.plugin_gateways import until
from support.sample_plugins import Files, plugin

from baton.config.groups import SceneSettings
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import GatewayOverloaded, IdempotencyKeyReused, SceneNotFound, SceneNotReady
from baton.http.routes.processes import data_of
from baton.pooling import jobs as jobs_module
from baton.pooling.jobs import Job, SceneJobs
from baton.pooling.plugin import ResultFile
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import GatewayMetrics

BODY = {"model": "geo", "data": {"numbers": [0.03, 0.01, 0.02]}}


@contextmanager
def gateway_of(
    folder: Path, instance: Any, behaviour: FakeBehaviour | None = None, **scenes: Any
) -> Iterator[FakeGateway]:
    engine = FakeEngine("geo", pooling=True, plugin=plugin(instance), behaviour=behaviour or FakeBehaviour())
    with run_fake(engine, FakeEngine("other"), scenes={"folder": folder / "scenes", **scenes}) as gateway:
        yield gateway


def finished(client: httpx.Client, where: str) -> dict[str, Any]:
    shown: dict[str, Any] = {}

    def over() -> bool:
        shown.update(client.get(where).json())
        return shown["state"] in ("done", "failed")

    assert until(over), shown
    return shown


def test_a_scene_is_done_and_its_files_stay(tmp_path: Path) -> None:
    """202 with its address; then its files, whole and in ranges, until it is deleted; nothing else is left."""
    made = tmp_path / "made"
    made.mkdir()
    with gateway_of(tmp_path, Files(made)) as gateway, gateway.client() as client:
        begun = client.post("/v1/scenes", json=BODY)
        where = begun.headers["location"]
        assert (begun.status_code, where) == (202, f"/v1/scenes/{begun.json()['id']}")
        shown = finished(client, where)
        assert (shown["state"], shown["percent"], shown["model"]) == ("done", 100, "geo")
        assert [(file["name"], file["bytes"]) for file in shown["files"]] == [
            ("mask.tif", 8),
            ("preview.png", 9),
        ]
        mask = client.get(shown["files"][0]["href"])
        assert (mask.content, mask.headers["content-type"]) == (b"sum 0.06", "image/tiff")
        part = client.get(f"{where}/mask.tif", headers={"range": "bytes=4-7"})
        assert (part.status_code, part.content) == (206, b"0.06")
        assert part.headers["content-range"] == "bytes 4-7/8"
        assert client.get(f"{where}/mask.tif", headers={"range": "bytes=-4"}).content == b"0.06"
        again = client.get(f"{where}/mask.tif", headers={"if-none-match": mask.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert [job["id"] for job in client.get("/v1/scenes").json()["data"]] == [shown["id"]]
        for name in ("job.json", "..%2Fjob.json", "nothing.tif"):
            assert client.get(f"{where}/{name}").json()["error"]["code"] in ("scene_not_found", "not_found")
        assert not list(made.iterdir())
        assert client.delete(where).json()["deleted"] is True
        for path in (where, f"{where}/mask.tif"):
            assert client.get(path).json()["error"]["code"] == "scene_not_found"
        assert not list((tmp_path / "scenes").iterdir())


def test_a_file_that_was_left_out_is_said_to_be(tmp_path: Path) -> None:
    """The job is done and names it with the reason, which is the 404's too; OGC clients read it as well."""

    class Partly(Files):
        def left_out(self, _output: Any) -> dict[str, str]:
            return {"mask.gpkg": "polygons_left_out: there are too many"}

    with gateway_of(tmp_path, Partly(tmp_path)) as gateway, gateway.client() as client:
        where = client.post("/v1/scenes", json=BODY).headers["location"]
        shown = finished(client, where)
        assert (shown["state"], [file["name"] for file in shown["files"]]) == (
            "done",
            ["mask.tif", "preview.png"],
        )
        assert shown["left_out"] == [{"name": "mask.gpkg", "reason": "polygons_left_out: there are too many"}]
        missing = client.get(f"{where}/mask.gpkg")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "scene_not_found")
        assert "polygons_left_out: there are too many" in missing.json()["error"]["message"]
        assert (
            client.get(f"{where}/mask.gpk").json()["error"]["message"] != missing.json()["error"]["message"]
        )
        status = client.get(f"/ogc/jobs/{shown['id']}").json()
        assert (status["status"], "polygons_left_out" in status["message"]) == ("successful", True)


RANGES: list[tuple[str, bytes | None]] = [
    ("bytes=2-3", b"23"),
    ("bytes=7-", b"789"),
    ("bytes=-2", b"89"),
    ("bytes=-99", b"0123456789"),
    ("Bytes=2-99", b"23456789"),
    ("bytes= 2-3 , , 40-50", b"23"),
    ("bytes=0-99999999999999999999999", b"0123456789"),
    ("bytes=3-5,0-4", b"012345"),
    ("bytes=10-", None),
    ("bytes=-0", None),
    ("bytes=10-12,-0", None),
    *((odd, b"") for odd in ("0-5", "-", "bytes", "bytes=", "bytes=,", "bytes=a", "bytes=5-2", "bytes=1-2,b", "bytes=--1",
                              "bytes=0x1-2", "bytes=1 -2", "rows=0-5", "bytes=\u00b2-", "bytes 0-5")),
]  # fmt: skip
"""By `Range`, what it has of ten bytes; None: nothing; empty: it is ignored."""


def ten_bytes(client: httpx.Client, folder: Path) -> list[str]:
    """The addresses of two files of ten bytes, of a scene and of a batch."""
    where = client.post("/v1/scenes", json=BODY).headers["location"]
    scene = finished(client, where)["id"]
    kept = folder / "scenes" / scene
    (kept / "files" / "mask.tif").write_bytes(b"0123456789")
    upload = {"file": ("a.jsonl", b"0123456789")}
    file = client.post("/v1/files", data={"purpose": "batch"}, files=upload).json()
    return [f"{where}/mask.tif", f"/v1/files/{file['id']}/content"]


def test_ranges_are_those_of_the_standard(tmp_path: Path) -> None:
    """Of every file that is sent: what is no range is ignored, only what the file has none of is a 416."""
    engine = FakeEngine("geo", pooling=True, plugin=plugin(Files(tmp_path)))
    folders = {"scenes": {"folder": tmp_path / "scenes"}, "batches": {"folder": tmp_path / "batches"}}
    with run_fake(engine, FakeEngine("other"), **folders) as gateway, gateway.client() as client:
        for path in ten_bytes(client, tmp_path):
            whole = client.get(path)
            assert (whole.status_code, whole.content, whole.headers["accept-ranges"]) == (
                200,
                b"0123456789",
                "bytes",
            )
            for asked, part in RANGES:
                got = client.get(path, headers={"range": asked.encode()})
                if part is None:
                    assert (got.status_code, got.json()["error"]["code"]) == (416, "range_not_satisfiable")
                    assert got.headers["content-range"] == "bytes */10", asked
                else:
                    expected = (206, part) if part else (200, whole.content)
                    assert (got.status_code, got.content) == expected, asked
            two = client.get(path, headers={"range": "bytes=8-9,0-1"})
            assert (two.status_code, two.content.count(b"Content-Range: bytes ")) == (206, 2)
            for stated, status in (
                (whole.headers["etag"], 206),
                (whole.headers["last-modified"], 206),
                ('"other"', 200),
                (f"W/{whole.headers['etag']}", 200),
                ("Thu, 01 Jan 1970 00:00:00 GMT", 200),
            ):
                got = client.get(path, headers={"range": "bytes=2-3", "if-range": stated})
                assert got.status_code == status, stated
            beyond = client.get(path, headers={"range": "bytes=10-", "if-range": '"other"'})
            assert (beyond.status_code, beyond.content) == (200, whole.content)
        page = client.get("/docs/start.js", headers={"range": "0-5"})
        assert (page.status_code, page.content) == (200, client.get("/docs/start.js").content)
        scene = ten_bytes(client, tmp_path)[0]
        tag = client.get(scene).headers["etag"]
        again = client.get(scene, headers={"range": "bytes=10-", "if-none-match": tag})
        assert again.status_code == 304


def test_an_upload_is_a_job_too(tmp_path: Path) -> None:
    """As for `/pooling`; its file goes when the job is over."""
    spool = tmp_path / "spool"
    spool.mkdir()
    engine = FakeEngine("geo", pooling=True, plugin=plugin(Files(tmp_path)))
    scenes = {"folder": tmp_path / "scenes"}
    with (
        run_fake(engine, FakeEngine("other"), scenes=scenes, pooling={"spool_dir": spool}) as gateway,
        gateway.client(headers={"content-type": "image/tiff", "idempotency-key": "k"}) as client,
    ):
        begun = client.post("/v1/scenes?model=geo", content=b"\1\2\3\4")
        assert finished(client, begun.headers["location"])["state"] == "done"
        assert client.post("/v1/scenes?model=geo", content=b"\1\2\3\4").json()["id"] == begun.json()["id"]
        other = client.post("/v1/scenes?model=geo", content=b"\1\2\3\5")
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
        assert until(lambda: not list(spool.iterdir()))


def test_a_key_repeats_nothing(tmp_path: Path) -> None:
    """While it runs as when it is done; a job whose plugin refuses says so, in the plugin's words."""
    with gateway_of(tmp_path, Files(tmp_path)) as gateway, gateway.client() as client:
        keyed = {"idempotency-key": "the one"}
        first = client.post("/v1/scenes", json=BODY, headers=keyed).json()
        assert client.post("/v1/scenes", json=BODY, headers=keyed).json()["id"] == first["id"]
        assert client.post("/v1/scenes", json=BODY).json()["id"] != first["id"]
        refused = client.post("/v1/scenes", json=BODY, headers={"idempotency-key": "x" * 256})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "idempotency-key")
        bad = {"model": "geo", "data": {"numbers": [1], "in": "pre", "do": "refuse"}}
        where = client.post("/v1/scenes", json=bad).headers["location"]
        shown = finished(client, where)
        assert (shown["state"], shown["error"]["code"], shown["files"]) == ("failed", "too_cloudy", [])
        assert client.get(f"{where}/mask.tif").json()["error"]["code"] == "scene_not_ready"
        assert client.post("/v1/scenes", json={"model": "other", "data": {}}).status_code == 400
        asked = client.post("/v1/scenes", json=BODY | {"follow_up": {"model": "other"}})
        assert (asked.status_code, asked.json()["error"]["param"]) == (400, "follow_up")
    with gateway_of(tmp_path, Files(tmp_path), budget=0) as gateway, gateway.client() as client:
        assert client.post("/v1/scenes", json=BODY).json()["error"]["code"] == "operation_unsupported"


@pytest.mark.fault("F23")
def test_a_deleted_job_frees_what_it_held(tmp_path: Path) -> None:
    """Its prompts leave the engine and its plugin forgets it, before the answer."""
    held, instance = Held(), Files(tmp_path)
    with (
        gateway_of(tmp_path, instance, FakeBehaviour(wait=held)) as gateway,
        gateway.client() as client,
    ):
        body = {"model": "geo", "data": {"numbers": [100.0, 100.0]}}
        where = client.post("/v1/scenes", json=body).headers["location"]
        assert until(lambda: instance.threads), "its plugin works on it"
        assert client.get(where).json()["state"] == "running"
        client.delete(where)
        assert len(instance.forgotten) == 1
        assert client.get(where).status_code == 404
        assert finished(client, client.post("/v1/scenes", json=BODY).headers["location"])["state"] == "done"


def jobs_of(folder: Path, **settings: Any) -> SceneJobs:
    wall = settings.pop("wall", lambda: 1000.0)
    return SceneJobs(SceneSettings(**settings), folder, GatewayMetrics().queues, wall=wall)


class Stub:
    """A runner whose answer is one file."""

    plugin = SimpleNamespace(lasting={})

    def __init__(self, file: Path) -> None:
        self.file = file

    async def progress(self, _context: Any) -> dict[str, int]:
        return {}

    async def run(self, *_: Any, **__: Any) -> Any:
        async def files() -> list[ResultFile]:
            return [ResultFile("mask.tif", "image/tiff", self.file)]

        async def close() -> None:
            return None

        async def left_out() -> dict[str, str]:
            return {}

        return SimpleNamespace(files=files, left_out=left_out, close=close)


async def one(jobs: SceneJobs, file: Path, tenant: str, key: str = "", size: int = 1) -> Job:
    async def release() -> None:
        return None

    context = RequestContext("r", None, None, None, tenant)
    runner: Any = Stub(file)
    job = await jobs.begin(runner, {}, context, model="m", key=key, body=b"1", size=size, release=release)
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == job.id))
    return await jobs.get(job.id, tenant)


async def test_a_scene_is_its_tenants_alone(tmp_path: Path) -> None:
    """Neither shown nor deleted nor found by a key for another; and another gateway finds it for its own."""
    file = tmp_path / "mask.tif"
    file.write_bytes(b"mask")
    jobs = jobs_of(tmp_path / "scenes")
    job = await one(jobs, file, "acme", key="k")
    for ask in (
        jobs.get(job.id, "other"),
        jobs.file(job.id, "other", "mask.tif"),
        jobs.delete(job.id, "other"),
    ):
        with pytest.raises(SceneNotFound):
            await ask
    assert await jobs.listed("other") == []
    assert (await one(jobs, file, "other", key="k")).id != job.id
    later = jobs_of(tmp_path / "scenes")
    path, kept = await later.file(job.id, "acme", "mask.tif")
    assert (path.read_bytes(), kept.bytes) == (b"mask", 4)
    assert (await one(later, file, "acme", key="k")).id == job.id
    for odd in ("scene-..", "../x", "scene-" + "0" * 32, ""):
        with pytest.raises(SceneNotFound):
            await later.get(odd, "acme")


async def test_scenes_expire_and_make_room(tmp_path: Path) -> None:
    """The oldest of the tenant with most bytes go first; what does not fit at all is refused by name."""
    file = tmp_path / "mask.tif"
    file.write_bytes(b"x" * 400)
    now = [0.0]
    jobs = jobs_of(tmp_path / "scenes", budget=1000, ttl_s=60, wall=lambda: now[0])
    mine = await one(jobs, file, "small")
    first = await one(jobs, file, "large")
    now[0] = 1.0
    file.write_bytes(b"x" * 500)
    second = await one(jobs, file, "large")
    assert (second.state, {job.id for job in await jobs.listed("small")}) == ("done", {mine.id})
    assert [job.id for job in await jobs.listed("large")] == [second.id]
    with pytest.raises(SceneNotFound):
        await jobs.get(first.id, "large")
    file.write_bytes(b"x" * 1001)
    with pytest.raises(GatewayOverloaded):
        await one(jobs, file, "small", size=1001)
    refused = await one(jobs, file, "small")
    assert refused.error is not None
    assert refused.error["code"] == "scene_too_large"
    now[0] = 100.0
    assert await jobs.listed("large") == await jobs.listed("small") == []
    assert not list((tmp_path / "scenes").iterdir())


def test_a_file_that_made_room_since_it_was_found_is_a_404(tmp_path: Path) -> None:
    """Its record was read, then another scene took its place: asked for whole, in ranges and by HEAD."""
    made = tmp_path / "made"
    made.mkdir()
    with gateway_of(tmp_path, Files(made)) as gateway, gateway.client() as client:
        begun = client.post("/v1/scenes", json=BODY)
        shown = finished(client, begun.headers["Location"])
        name = shown["files"][0]["name"]
        where = f"{begun.headers['Location']}/{name}"
        assert client.get(where).status_code == 200
        (kept,) = (tmp_path / "scenes").rglob(name)
        kept.unlink()
        for answer in client.get(where), client.get(where, headers={"Range": "bytes=0-1"}):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "scene_not_found")
        assert client.head(where).status_code == 404


async def test_a_job_that_ends_while_it_is_listed_keeps_its_files(tmp_path: Path) -> None:
    """Who reads it as running looks again once its lock is free."""
    file = tmp_path / "mask.tif"
    file.write_bytes(b"mask")
    job = await one(jobs_of(tmp_path / "scenes"), file, "acme")
    other = jobs_of(tmp_path / "scenes")
    read_before = replace(job, state="running", files=(), finished_at=None, expires_at=None)
    assert other._unless_lost(tmp_path / "scenes" / job.id, read_before) == job
    path, _ = await other.file(job.id, "acme", "mask.tif")
    assert path.read_bytes() == b"mask"


async def test_jobs_that_end_at_once_keep_to_the_budget_together(tmp_path: Path) -> None:
    file = tmp_path / "mask.tif"
    file.write_bytes(b"x" * 80)
    jobs = jobs_of(tmp_path / "scenes", budget=100)
    ended = await asyncio.gather(*(one(jobs, file, tenant) for tenant in "abcd"), return_exceptions=True)
    assert all(isinstance(job, Job | SceneNotFound) for job in ended), (
        ended
    )  # not found: it made room already
    kept = [job for tenant in "abcd" for job in await jobs.listed(tenant) if job.state == "done"]
    assert [job.bytes for job in kept] == [80]


async def test_a_job_whose_record_is_written_before_it_has_ended_counts_once(tmp_path: Path) -> None:
    """Its record says that it is done while it is still among the running ones; the other finds room beside it."""
    file = tmp_path / "mask.tif"
    file.write_bytes(b"x" * 40)
    jobs = jobs_of(tmp_path / "scenes", budget=100)
    done, go_on = asyncio.Event(), asyncio.Event()
    note = jobs._note

    async def note_and_wait(running: Any, job: Job) -> None:
        await note(running, job)
        if job.tenant == "a" and job.state == "done":
            done.set()
            await go_on.wait()

    jobs._note = note_and_wait  # type: ignore[method-assign]
    first = asyncio.create_task(one(jobs, file, "a"))
    await done.wait()
    file.write_bytes(b"x" * 50)
    second = await one(jobs, file, "b")
    go_on.set()
    assert (second.state, (await first).state) == ("done", "done")


async def test_a_job_that_is_done_and_not_gone_counts_once(tmp_path: Path) -> None:
    """Its record tells its bytes already, and it may make room; what cannot fit takes nothing away."""
    file = tmp_path / "mask.tif"
    file.write_bytes(b"x" * 80)
    jobs = jobs_of(tmp_path / "scenes", budget=100)
    done = await one(jobs, file, "a")
    assert not jobs._make_room("b", 80, {"scene-other": 40})
    assert [job.id for job in await jobs.listed("a")] == [done.id]
    assert jobs._make_room("b", 80, {done.id: 80})
    assert await jobs.listed("a") == []


async def test_two_deletes_end_a_job_once_and_for_all(tmp_path: Path) -> None:
    begun, released = asyncio.Event(), list[None]()

    class Endless(Stub):
        async def run(self, *_: Any, **__: Any) -> Any:
            begun.set()
            await asyncio.sleep(600)

    async def release() -> None:
        released.append(None)

    jobs = jobs_of(tmp_path / "scenes")
    runner: Any = Endless(tmp_path)
    context = RequestContext("r", None, None, None, "acme")
    job = await jobs.begin(runner, {}, context, model="m", key="", body=b"1", size=1, release=release)
    await begun.wait()
    deletes = [asyncio.create_task(jobs.delete(job.id, "acme")) for _ in range(3)]
    await asyncio.gather(*deletes, return_exceptions=True)
    assert released == [None]
    assert jobs._running == {}
    assert await jobs.listed("acme") == []


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from protocol.test_scenes import Stub, jobs_of
from baton.telemetry.ids import RequestContext

class Halfway(Stub):
    async def run(self, *_, **__):
        await asyncio.sleep(0)
        (part := self.file / (await jobs.listed("acme"))[0].id / "files.part").mkdir()
        (part / "mask.tif").write_bytes(b"half")
        print("halfway", flush=True)
        await asyncio.sleep(600)

async def main():
    global jobs
    jobs = jobs_of(Path(sys.argv[1]))
    async def release(): pass
    context = RequestContext("r", None, None, None, "acme")
    await jobs.begin(Halfway(Path(sys.argv[1])), {}, context, model="m", key="k", body=b"1", size=1, release=release)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.fault("F24")
@pytest.mark.timeout(60)
def test_a_killed_gateway_leaves_a_job_that_says_so(tmp_path: Path) -> None:
    """SIGKILL in the middle: while it lives its job runs for others too; then it has failed, and has no file."""
    folder, paths = tmp_path / "scenes", [path for path in sys.path if path]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(folder), *paths]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"halfway\n"
        jobs = jobs_of(folder)
        (job,) = asyncio.run(jobs.listed("acme"))
        assert job.state == "running"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (lost,) = asyncio.run(jobs.listed("acme"))
    assert lost.error is not None
    assert (lost.state, lost.error["code"], lost.error["retryable"]) == ("failed", "scene_lost", True)
    with pytest.raises(SceneNotReady):
        asyncio.run(jobs.file(job.id, "acme", "mask.tif"))
    assert [path.name for path in (folder / job.id).iterdir()] == ["job.json"]


async def test_an_error_of_our_own_ends_the_job(tmp_path: Path) -> None:
    """It is failed, and shows nothing of the cause."""

    class Broken(Stub):
        async def run(self, *_: Any, **__: Any) -> Any:
            raise LookupError("/etc/secret")

    async def release() -> None:
        return None

    jobs = jobs_of(tmp_path)
    context = RequestContext("r", None, None, None, "acme")
    broken: Any = Broken(tmp_path)
    job = await jobs.begin(broken, {}, context, model="m", key="", body=b"1", size=1, release=release)
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == job.id))
    failed = await jobs.get(job.id, "acme")
    assert failed.error is not None
    assert (failed.state, failed.error["code"]) == ("failed", "internal_error")
    assert "secret" not in str(failed.error)


async def test_of_failed_jobs_the_last_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tenant, also of those that a gateway lost; what is done stays."""
    monkeypatch.setattr(jobs_module, "FAILED_KEPT", 3)
    (file := tmp_path / "mask.tif").write_bytes(b"mask")
    now = [0.0]
    jobs = jobs_of(tmp_path / "scenes", wall=lambda: now[0])
    done = await one(jobs, file, "acme")
    other = await one(jobs, tmp_path / "none.tif", "other")
    assert (done.state, other.state) == ("done", "failed")
    lost = Job("scene-" + "0" * 32, "acme", "m", "running", 0.0)
    (tmp_path / "scenes" / lost.id).mkdir()
    jobs._write(lost)
    failed: list[str] = []
    for _ in range(5):
        now[0] += 1
        failed.append((await one(jobs, tmp_path / "none.tif", "acme")).id)
    assert {job.id for job in await jobs.listed("acme")} == {done.id, *failed[-3:]}
    assert [job.id for job in await jobs.listed("other")] == [other.id]
    assert len(list((tmp_path / "scenes").iterdir())) == 5


async def test_a_closed_gateway_says_so_too(tmp_path: Path) -> None:
    """A stop ends its jobs, and a record that cannot be read is no job."""

    class Endless(Stub):
        async def run(self, *_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

    async def release() -> None:
        released.append(True)

    released: list[bool] = []
    jobs = jobs_of(tmp_path)
    context = RequestContext("r", None, None, None, "acme")
    endless: Any = Endless(tmp_path)
    job = await jobs.begin(endless, {}, context, model="m", key="k", body=b"1", size=1, release=release)
    with pytest.raises(IdempotencyKeyReused):
        await jobs.begin(endless, {}, context, model="m", key="k", body=b"2", size=1, release=release)
    await jobs.aclose()
    assert len(released) == 2
    (lost,) = await jobs_of(tmp_path).listed("acme")
    assert (lost.id, lost.state) == (job.id, "failed")
    (tmp_path / job.id / "job.json").write_text("{")
    assert await jobs_of(tmp_path).listed("acme") == []


def test_a_folder_that_cannot_be_used_is_said_to_be(tmp_path: Path) -> None:
    """A file in its place: 503, and the gateway goes on."""
    (tmp_path / "scenes").write_bytes(b"")
    with gateway_of(tmp_path, Files(tmp_path)) as gateway, gateway.client() as client:
        refused = client.post("/v1/scenes", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gateway_overloaded")
        assert client.post("/pooling", json=BODY).status_code == 200


def test_a_map_is_kept_with_all_that_qgis_opens(tmp_path: Path) -> None:
    """The shipped map's plugin: seven files; the mask is the one that `/pooling` gives, in its types too."""
    spool = tmp_path / "spool"
    spool.mkdir()
    scenes = {"folder": tmp_path / "scenes"}
    upload = {"content-type": "image/tiff"}
    with (
        map_engine(spool) as engine,
        run_fake(engine, FakeEngine("other"), scenes=scenes) as gateway,
        gateway.client() as client,
    ):
        begun = client.post("/v1/scenes?model=map", content=SCENE.read_bytes(), headers=upload)
        shown = finished(client, begun.headers["location"])
        assert shown["state"] == "done", shown
        assert 0 < shown["tiles"] == shown["tiles_done"]
        assert [file["name"] for file in shown["files"]] == [
            "mask.tif", "probabilities.tif", "preview.png", "mask.geojson", "mask.gpkg", "mask.qml", "item.json",
        ]  # fmt: skip
        files = {file["name"]: client.get(file["href"]).content for file in shown["files"]}
        item = json.loads(files["item.json"])
        assert item["id"] == shown["id"]
        assert {f"./{name}" for name in files} - {"./item.json"} == {
            asset["href"] for asset in item["assets"].values()
        }
        for kind, name in (("image/tiff", "mask.tif"), ("application/geo+json", "mask.geojson")):
            at_once = client.post(
                "/pooling?model=map", content=SCENE.read_bytes(), headers=upload | {"accept": kind}
            )
            assert (at_once.status_code, at_once.headers["content-type"]) == (200, kind)
            assert at_once.content == files[name]
        package = client.post(
            "/pooling?model=map",
            content=SCENE.read_bytes(),
            headers=upload | {"accept": "application/geopackage+sqlite3"},
        )
        assert package.content.startswith(b"SQLite format 3\0")
        assert until(lambda: not list(spool.iterdir()))


@pytest.mark.fault("F23")
def test_a_deleted_map_frees_its_process_and_files(tmp_path: Path) -> None:
    """While its tiles are in the engine: its only decoder, its process and all its files are free at the answer."""
    spool = tmp_path / "spool"
    spool.mkdir()
    reached, upload = threading.Event(), {"content-type": "image/tiff"}

    async def never() -> None:
        reached.set()
        await asyncio.Event().wait()

    with (
        map_engine(spool, decoders=1) as engine,
        run_fake(engine, FakeEngine("other"), scenes={"folder": tmp_path / "scenes"}) as gateway,
        gateway.client() as client,
    ):
        engine.until = never
        begun = client.post("/v1/scenes?model=map", content=SCENE.read_bytes(), headers=upload)
        assert reached.wait(20)
        assert engine.plugin is not None
        server = engine.plugin.instance._decoders._fork_server._server.process
        (process,) = psutil.Process(server.pid).children()
        client.delete(begun.headers["location"])
        assert not list(spool.iterdir())
        assert not list((tmp_path / "scenes").iterdir())
        assert not process.is_running()
        engine.until = None
        again = client.post("/v1/scenes?model=map", content=SCENE.read_bytes(), headers=upload)
        assert finished(client, again.headers["location"])["state"] == "done"


def test_ogc_clients_run_the_same_jobs(tmp_path: Path) -> None:
    """From the landing page to the results, by links alone; errors are OGC's exceptions with ours within."""
    spool = tmp_path / "spool"
    spool.mkdir()
    with (
        map_engine(spool) as engine,
        run_fake(engine, FakeEngine("other"), scenes={"folder": tmp_path / "scenes"}) as gateway,
        gateway.client() as client,
    ):

        def linked(shown: dict[str, Any], rel: str) -> str:
            return next(str(link["href"]) for link in shown["links"] if link["rel"].endswith(rel))

        landing = client.get("/ogc").json()
        assert any(
            name.endswith("/conf/core") for name in client.get("/ogc/conformance").json()["conformsTo"]
        )
        (process,) = client.get(linked(landing, "/processes")).json()["processes"]
        described = client.get(linked(process, "self")).json()
        assert (described["id"], "async-execute" in described["jobControlOptions"]) == ("map", True)
        scene = {"value": base64.b64encode(SCENE.read_bytes()).decode(), "mediaType": "image/tiff"}
        body = {
            "inputs": {"scene": scene, "window": [0, 0, 64, 48]},
            "outputs": {"mask": {}, "polygons": {"transmissionMode": "reference"}},
        }
        begun = client.post(linked(described, "/execute"), json=body, headers={"prefer": "respond-async"})
        where = begun.headers["location"]
        assert (begun.status_code, where) == (201, linked(begun.json(), "self"))
        assert until(lambda: client.get(where).json()["status"] in ("successful", "failed"))
        done = client.get(where).json()
        assert (done["status"], done["progress"], done["processID"]) == ("successful", 100, "map"), done
        results = client.get(linked(done, "/results")).json()
        assert list(results) == ["mask", "polygons"]
        assert client.get(results["polygons"]["href"]).json()["type"] == "FeatureCollection"
        assert [job["jobID"] for job in client.get(linked(landing, "/job-list")).json()["jobs"]] == [
            done["jobID"]
        ]
        assert client.get(f"/v1/scenes/{done['jobID']}").json()["state"] == "done"
        refused = client.post(
            "/ogc/processes/map/execution", json={"inputs": {"scene": "AAAA", "indexes": [1]}}
        )
        lost = refused.headers["location"]
        assert until(lambda: client.get(lost).json()["status"] == "failed")
        assert "did you mean 'indices'?" in client.get(lost).json()["message"]
        assert client.get(f"{lost}/results").status_code == 500
        assert client.delete(where).json()["status"] == "dismissed"
        for path, kind in ((where, "no-such-job"), ("/ogc/processes/other", "no-such-process")):
            gone = client.get(path)
            assert (gone.status_code, gone.json()["type"].rpartition("/")[2]) == (404, kind)
            assert gone.json()["error"]["request_id"]


KINDS: dict[str, tuple[Any, dict[str, str]]] = {
    "classes": (
        None,
        {
            "mask": "Class of each pixel", "probabilities": "Probability of each class",
            "preview": "Picture of the result over the scene", "polygons": "Polygons of the classes",
            "geopackage": "The same polygons as a GeoPackage", "style": "Style of the mask for QGIS",
            "item": "STAC item of the files",
        },
    ),
    "values": (
        regression,
        {"value": "Value of each pixel, Mg/ha", "preview": "Picture of the result over the scene"},
    ),
    "vectors": (encoder, {"embeddings": "Vector of each patch"}),
}  # fmt: skip
"""By kind of model, its config.json and its outputs."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_is_described_as_the_models_card_says(tmp_path: Path, kind: str) -> None:
    """Outputs of its kind alone; one that asks for all of them by name has each in its results, as described."""
    config, titles = KINDS[kind]
    (tmp_path / "spool").mkdir()
    pixels = np.random.default_rng(1).integers(900, 2000, (6, 64, 64)).astype("int16")
    path = write_tiff(tmp_path / "a.tif", pixels, tuple(SIX))
    with (
        map_engine(tmp_path / "spool", config and config()) as engine,
        run_fake(engine, FakeEngine("other"), scenes={"folder": tmp_path / "scenes"}) as gateway,
        gateway.client() as client,
    ):
        described = client.get("/ogc/processes/map").json()
        assert {name: output["title"] for name, output in described["outputs"].items()} == titles
        assert ("sieve" in described["inputs"]) == (kind == "classes")
        scene = {"value": base64.b64encode(path.read_bytes()).decode(), "mediaType": "image/tiff"}
        for outputs in ({}, {"outputs": {name: {} for name in titles}}):
            body = {"inputs": {"scene": scene}, **outputs}
            where = client.post("/ogc/processes/map/execution", json=body).headers["location"]
            assert until(lambda: client.get(where).json()["status"] in ("successful", "failed"))  # noqa: B023
            assert client.get(where).json()["status"] == "successful", client.get(where).json()
            results = client.get(f"{where}/results").json()
            table = {"embeddings.parquet"} if kind == "vectors" else set()
            assert set(results) - table == set(titles)
            for name, output in described["outputs"].items():
                assert results[name]["type"] == output["schema"]["contentMediaType"]


BOXES = [
    ({"bbox": {"bbox": [1, 2, 3, 4]}}, {"bbox": [1, 2, 3, 4]}),
    (
        {"bbox": {"bbox": [1, 2, 3, 4], "crs": "http://www.opengis.net/def/crs/OGC/1.3/CRS84"}},
        {"bbox": [1, 2, 3, 4], "bbox_crs": "EPSG:4326"},
    ),
    (
        {"bbox": {"bbox": [1, 2, 3, 4], "crs": "http://www.opengis.net/def/crs/EPSG/0/32633"}},
        {"bbox": [1, 2, 3, 4], "bbox_crs": "EPSG:32633"},
    ),
    (  # by its address it has latitudes first
        {"bbox": {"bbox": [45, 14, 46, 15], "crs": "http://www.opengis.net/def/crs/EPSG/0/4326"}},
        {"bbox": [14, 45, 15, 46], "bbox_crs": "EPSG:4326"},
    ),
    ({"scene": {"href": "https://a.org/s.tif"}}, {"data": "https://a.org/s.tif", "data_format": "url"}),
    ({"item": {"href": "https://a.org/i.json"}}, {"item": "https://a.org/i.json"}),
    ({"assets": {"B02": {"href": "u"}}}, {"assets": {"B02": {"data": "u", "data_format": "url"}}}),
]


@pytest.mark.parametrize(("inputs", "data"), BOXES)
def test_ogc_inputs_are_the_plugins_fields(inputs: dict[str, Any], data: dict[str, Any]) -> None:
    """Links, boxes and their CRSs in OGC's forms."""
    assert data_of({"inputs": inputs}) == data
