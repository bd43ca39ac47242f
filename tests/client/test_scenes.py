"""Scenes go out as files, in pieces, and answers come back as bytes or as files."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from support.gateways import run_fake
from support.plugin_gateways import served
from support.sample_plugins import Files, plugin

from baton.engines.fake.engine import FakeEngine
from baton_client import AsyncBaton, Baton, ConnectionLost, InvalidRequest, NotFound, Progress, SceneFailed

SCENE = b"\1\2\3\4"


def test_a_scene_is_answered_with_its_mask(tmp_path: Path) -> None:
    instance = Files(tmp_path)
    with served(instance) as gateway, Baton(gateway.url) as baton:
        answer = baton.scene("geo", SCENE, indices=[2, 1, 0], scale=0.5)
        assert (answer.media_type, answer.content, answer.path) == ("image/tiff", b"sum 0.1", None)
        assert baton.scene("geo", SCENE, accept="application/json").json()["data"]["sum"] == pytest.approx(
            0.1
        )
    assert instance.uploads[0]["query"] == {"indices": "2,1,0", "scale": "0.5"}
    assert instance.uploads[0]["type"] == "image/tiff"


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("s.tif", "image/tiff"), ("s.JPG", "image/jpeg"), ("s", "application/octet-stream")],
)
def test_the_files_name_says_what_it_is(tmp_path: Path, name: str, media_type: str) -> None:
    (tmp_path / name).write_bytes(SCENE)
    instance = Files(tmp_path)
    with served(instance) as gateway, Baton(gateway.url) as baton:
        baton.scene("geo", str(tmp_path / name))
        baton.scene("geo", tmp_path / name, media_type="image/png")
    assert [upload["type"] for upload in instance.uploads] == [media_type, "image/png"]


def test_a_file_is_not_read_into_memory_and_each_piece_is_told(tmp_path: Path) -> None:
    size = 24 * 1024 * 1024
    scene, told = tmp_path / "scene.tif", list[Progress]()
    with scene.open("wb") as file:
        file.write(SCENE)
        file.truncate(size)
    (tmp_path / "out").mkdir()
    with served(Files(tmp_path / "out")) as gateway, Baton(gateway.url) as baton:
        tracemalloc.start()
        own: list[int] = []

        def report(progress: Progress) -> None:
            told.append(progress)
            found = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/baton_client/*")])
            own.append(sum(each.size for each in found.statistics("filename")))

        try:
            answer = baton.scene("geo", scene, target=tmp_path / "mask.tif", progress=report)
        finally:
            tracemalloc.stop()
    assert max(own) < 4 * 1024 * 1024
    sending = [progress for progress in told if progress.stage == "sending"]
    assert [progress.done for progress in sending] == [(i + 1) << 20 for i in range(24)]
    assert {progress.total for progress in sending} == {size}
    assert told[-1] == Progress("receiving", 7, 7)
    assert (answer.content, answer.path) == (b"", tmp_path / "mask.tif")
    assert (tmp_path / "mask.tif").read_bytes() == b"sum 0.1"


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "mask.tif").write_bytes(b"of yesterday")
    (tmp_path / "work").mkdir()
    with served(Files(tmp_path / "work")) as gateway, Baton(gateway.url) as baton:
        with pytest.raises(InvalidRequest) as refused:
            baton.scene("geo", SCENE, accept="text/html", target=tmp_path / "mask.tif")
        assert refused.value.code == "not_acceptable"

        def broken(progress: Progress) -> None:
            if progress.stage == "receiving":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            baton.scene("geo", SCENE, target=tmp_path / "mask.tif", progress=broken)
        assert (tmp_path / "mask.tif").read_bytes() == b"of yesterday"
        baton.scene("geo", SCENE, target=tmp_path / "mask.tif")
    assert (tmp_path / "mask.tif").read_bytes() == b"sum 0.1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mask.tif", "work"]


def test_what_cannot_be_read_or_written_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    with Baton("http://127.0.0.1:1", retries=0) as baton:
        with pytest.raises(FileNotFoundError):
            baton.scene("geo", tmp_path / "missing.tif")
        with pytest.raises(FileNotFoundError, match="no folder"):
            baton.scene("geo", SCENE, target=tmp_path / "nowhere" / "mask.tif")
        with pytest.raises(ConnectionLost):
            baton.scene("geo", SCENE)


async def test_the_async_client_does_the_same(tmp_path: Path) -> None:
    scene, told = tmp_path / "scene.tif", list[Progress]()
    scene.write_bytes(SCENE * (1 << 19))
    (tmp_path / "out").mkdir()
    with served(Files(tmp_path / "out")) as gateway:
        async with AsyncBaton(gateway.url) as baton:
            answer = await baton.scene("geo", scene, target=tmp_path / "mask.tif", progress=told.append)
            assert (await baton.scene("geo", SCENE)).content == b"sum 0.1"
    assert answer.path is not None
    assert answer.path.read_bytes() == b"sum 0.1"
    assert told == [
        Progress("sending", 1 << 20, 2 << 20),
        Progress("sending", 2 << 20, 2 << 20),
        Progress("receiving", 7, 7),
    ]


async def test_a_scene_is_followed_as_a_job_and_its_files_are_written(tmp_path: Path) -> None:
    """Sync and async, of a file and of JSON; told while it works; a refusal is an error of its own."""
    (tmp_path / "made").mkdir()
    engine = FakeEngine("geo", pooling=True, plugin=plugin(Files(tmp_path / "made")))
    with run_fake(engine, FakeEngine("other"), scenes={"folder": tmp_path / "scenes"}) as gateway:
        told: list[Progress] = []
        with Baton(gateway.url) as baton:
            kept = baton.keep_scene("geo", SCENE, tmp_path, progress=told.append, key="k")
            assert (kept.state, kept.percent, kept.files) == ("done", 100, ("mask.tif", "preview.png"))
            assert (tmp_path / "mask.tif").read_bytes() == b"sum 0.1"
            assert {progress.stage for progress in told} == {"sending", "computing", "receiving"}
            assert baton.keep_scene("geo", SCENE, key="k").id == kept.id
            with pytest.raises(SceneFailed) as caught:
                baton.keep_scene("geo", {"numbers": [1], "in": "pre", "do": "refuse"})
            assert caught.value.code == "too_cloudy"
            with pytest.raises(FileNotFoundError):
                baton.keep_scene("geo", SCENE, tmp_path / "nowhere")
        async with AsyncBaton(gateway.url) as client:
            again = await client.keep_scene("geo", {"numbers": [0.5]}, tmp_path)
            assert (tmp_path / "mask.tif").read_bytes() == b"sum 0.5"
            await client.delete_scene(again.id)
            with pytest.raises(NotFound):
                await client.get_scene(again.id)
