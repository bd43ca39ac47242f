"""Serial numbers bring every output back to its own scene, and to none that is gone."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from baton_geo import scenes as scenes_module
from baton_geo.contract import GeoOptions
from baton_geo.scenes import RunningScene, RunningScenes


class Thing:
    """What a scene owns; counts how often it was closed."""

    closed = 0

    def fetched(self) -> None:
        """Nothing was."""

    def close(self) -> None:
        self.closed += 1


def running(request_id: str | None = None, **given: Any) -> RunningScene:
    return RunningScene(Thing(), GeoOptions(), request_id, Thing(), **given)


def test_every_output_finds_its_scene_and_tile() -> None:
    """However the outputs of many scenes are mixed."""
    scenes = RunningScenes(60)
    many = [running(str(n)) for n in range(16)]
    for one in many:
        scenes.add(one)
    given = [(scenes.serial(one, (tile,)), one, (tile,)) for tile in range(20) for one in many]
    random.Random(1).shuffle(given)
    assert len({serial for serial, _, _ in given}) == len(given)
    for serial, one, tile in given:
        assert scenes.take(serial) == (one, tile)


def test_a_serial_number_is_good_once() -> None:
    """A second output under it belongs to nobody."""
    scenes = RunningScenes(60)
    one = running()
    scenes.add(one)
    serial = scenes.serial(one, (3,))
    scenes.take(serial)
    with pytest.raises(LookupError):
        scenes.take(serial)


def test_a_dropped_scene_is_closed_and_its_numbers_lead_nowhere() -> None:
    """Dropped twice, it is closed and forgotten all the same."""
    scenes = RunningScenes(60)
    one = running("r")
    scenes.add(one)
    serial = scenes.serial(one, (0,))
    scenes.drop(one)
    scenes.drop(one)
    assert one.scene.closed >= 1
    assert len(scenes) == 0
    with pytest.raises(LookupError):
        scenes.take(serial)


def test_only_the_scenes_of_a_request_are_its() -> None:
    """Scenes without a request id belong to no request."""
    scenes = RunningScenes(60)
    ours, theirs, offline = running("a"), running("b"), running(None)
    for one in (ours, theirs, offline):
        scenes.add(one)
    assert list(scenes.of_request("a")) == [ours]


def test_a_scene_nobody_came_back_for_goes_with_the_next() -> None:
    """An engine that failed between the hooks leaves no raster process behind for good."""
    scenes = RunningScenes(10)
    lost = running(began=-1000.0)
    scenes.add(lost)
    scenes.add(running())
    assert lost.scene.closed == 1
    assert len(scenes) == 1


def test_numbers_start_again_and_pass_over_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids are finite; a long-lived scene keeps its number."""
    monkeypatch.setattr(scenes_module, "SERIALS", 4)
    scenes = RunningScenes(60)
    one = running()
    scenes.add(one)
    kept = scenes.serial(one, (0,))
    for tile in range(1, 20):
        serial = scenes.serial(one, (tile,))
        assert 1 <= serial <= 4
        assert serial != kept
        assert scenes.take(serial) == (one, (tile,))


def test_threads_never_share_a_number() -> None:
    """Eight threads, one set of numbers."""
    scenes = RunningScenes(60)
    one = running()
    scenes.add(one)
    given: list[int] = []

    def work() -> None:
        given.extend(scenes.serial(one, (tile,)) for tile in range(500))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(given)) == 4000
