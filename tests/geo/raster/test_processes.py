"""Children, the fork server and their limits: what dies, what is cleaned up, what goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from geo.raster.made import make_card, read_tiff, read_tile, run, sign_model, write_tiff
from geo.raster.processes import REQUEST, children_of, fork_server_of, until, works
from support.paused_process import halt

from baton_geo.errors import DecoderBusy, GeoError, RasterBroken, RasterTooLarge
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from baton_geo.raster.open_scene import OpenScene, SceneClosed
from baton_geo.settings import GeoLimits


def test_the_gateway_side_loads_no_raster_library() -> None:
    """Importing and starting the decoders loads neither rasterio nor Pillow."""
    code = "import sys; from baton_geo.raster.decoders import Decoders; Decoders(1, 1).close(); print({'rasterio', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert done.stderr == ""


def test_closing_leaves_nothing(own: Decoders, raster: Path, folder: Path) -> None:
    """Closed in the middle of a scene: no child, no file, no descriptor, and the place is free again."""
    works(own, raster)
    before = psutil.Process().num_fds()
    for _ in range(3):
        with own.open(raster, SceneRequest(card=REQUEST.card, probabilities=True)) as scene:
            read_tile(scene, 0)
            assert len(children_of(own)) == 1
            assert len(list(folder.iterdir())) == 1
        assert children_of(own) == []
        assert list(folder.iterdir()) == []
    assert psutil.Process().num_fds() == before
    scene.close()  # once more does no harm
    with pytest.raises(SceneClosed):
        read_tile(scene, 1)


def test_a_refused_raster_leaves_nothing(own: Decoders, tmp_path: Path, folder: Path) -> None:
    """As many refusals as one likes: no child, no file, no place taken."""
    bad = tmp_path / "bad.tif"
    bad.write_bytes(b"II*\0" + bytes(100))
    for _ in range(5):
        with pytest.raises(RasterBroken):
            own.open(bad, REQUEST)
    assert children_of(own) == []
    assert list(folder.iterdir()) == []


def test_a_missing_file(own: Decoders, tmp_path: Path, folder: Path) -> None:
    """A file that is not there is the server's fault, not the raster's, and takes no place."""
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            own.open(tmp_path / "none.tif", REQUEST)
    assert list(folder.iterdir()) == []


def test_the_file_may_be_unlinked(own: Decoders, raster: Path) -> None:
    """An opened scene does not need the file's name."""
    with own.open(raster, REQUEST) as scene:
        raster.unlink()
        assert run(scene, sign_model).areas[1].pixels == 20_000


def test_all_taken(own: Decoders, raster: Path) -> None:
    """A third scene waits for one of two places, then hears that it is busy; a freed place is used."""
    with own.open(raster, REQUEST), own.open(raster, REQUEST) as second:
        started = time.monotonic()
        with pytest.raises(DecoderBusy):
            own.open(raster, REQUEST)
        assert 0.2 <= time.monotonic() - started < 10
        second.close()
        own.open(raster, REQUEST).close()


def test_a_waiting_thread_is_woken(own: Decoders, raster: Path) -> None:
    """`close` from another thread ends a read at once, even of a child that hangs."""
    scene = own.open(raster, REQUEST)
    halt(children_of(own)[0].pid)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            read_tile(scene, 0)
        except SceneClosed as error:
            caught.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.1)
    started = time.monotonic()
    scene.close()
    thread.join(30)
    assert time.monotonic() - started < 10
    assert len(caught) == 1
    assert children_of(own) == []


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (signal.SIGKILL, RasterTooLarge, "within the memory allowed"),
        (signal.SIGABRT, RasterTooLarge, "within the memory allowed"),
        (signal.SIGSEGV, RasterBroken, "could not be decoded"),
        (signal.SIGXCPU, RasterTooLarge, "took longer than the 900 s allowed"),
    ],
)
def test_a_child_that_dies(
    own: Decoders, raster: Path, number: int, kind: type[GeoError], words: str
) -> None:
    """A crash costs its own request, which hears what it means; the other scene and the next go on."""
    with own.open(raster, REQUEST) as scene, own.open(raster, REQUEST) as other:
        read_tile(scene, 0)
        victim = min(children_of(own), key=lambda child: child.create_time())
        victim.send_signal(number)
        with pytest.raises(kind, match=words):
            run_rest(scene)
        assert run(other, sign_model).areas[1].pixels == 20_000
    assert works(own, raster)


def run_rest(scene: OpenScene) -> None:
    for tile in range(1, scene.info.tiles):
        read_tile(scene, tile)


def test_too_little_memory(own: Decoders, tmp_path: Path, raster: Path) -> None:
    """A real allocation beyond the limit is refused as too large; the fork server goes on."""
    pixels = np.ones((1, 3000, 3000), "uint8")
    big = write_tiff(
        tmp_path / "big.tif", pixels, compress="deflate", tiled=True, blockxsize=1024, blockysize=1024
    )
    request = SceneRequest(card=make_card(8, tile=512), indices=(0,) * 8, limits=GeoLimits(memory=60_000_000))
    with pytest.raises(RasterTooLarge, match="memory"), own.open(big, request) as scene:
        run(scene, lambda tile: np.zeros((2, 512, 512), np.float32))
    assert works(own, raster)


def test_a_child_that_hangs(own: Decoders, raster: Path) -> None:
    """A request's time ends it, whatever the child does."""
    request = SceneRequest(card=REQUEST.card, limits=GeoLimits(seconds=0.6))
    with own.open(raster, request) as scene:
        halt(children_of(own)[0].pid)
        started = time.monotonic()
        with pytest.raises(RasterTooLarge, match=r"longer than the 0.6 s allowed"):
            read_tile(scene, 0)
        assert time.monotonic() - started < 10
    assert children_of(own) == []


def test_a_child_of_an_absent_gateway(own: Decoders, raster: Path) -> None:
    """Without anybody to answer, a child's own alarm and CPU limit are set."""
    request = SceneRequest(card=REQUEST.card, limits=GeoLimits(seconds=3))
    with own.open(raster, request):
        child = children_of(own)[0]
        limits = Path(f"/proc/{child.pid}/limits").read_text()
        assert [line.split()[3] for line in limits.splitlines() if line.startswith("Max cpu time")] == ["4"]
        assert [line.split()[3] for line in limits.splitlines() if line.startswith("Max core file")] == [
            "size"
        ]
        assert "Max open files            64" in limits
        space = [int(line.split()[3]) for line in limits.splitlines() if line.startswith("Max address space")]
        assert space[0] < 3 * 2**30


def test_a_child_holds_what_it_needs(own: Decoders, raster: Path) -> None:
    """A child's descriptors: nowhere three times, its socket, its pipe, its raster and its drafts."""
    with own.open(raster, REQUEST), own.open(raster, REQUEST) as scene:
        child = max(children_of(own), key=lambda one: one.create_time())
        held = [os.readlink(entry) for entry in Path(f"/proc/{child.pid}/fd").iterdir()]
        kinds = sorted(held, key=str)
        assert sum(name.startswith("socket:") for name in held) == 1, kinds
        assert sum(name.startswith("pipe:") for name in held) == 1, kinds
        allowed = ("/dev/null", "socket:", "pipe:", str(raster), str(scene._folder))
        strangers = [name for name in held if not name.startswith(allowed) and not name.endswith("proj.db")]
        assert strangers == []


def test_the_fork_server_is_scheduled_with_the_gateway(own: Decoders, raster: Path) -> None:
    """In its session, which the kernel schedules as a whole; in a process group that no Ctrl-C reaches."""
    with own.open(raster, REQUEST):
        for process in (fork_server_of(own), *children_of(own)):
            assert os.getsid(process.pid) == os.getsid(0)
            assert os.getpgid(process.pid) == fork_server_of(own).pid != os.getpgid(0)


def test_a_killed_fork_server_is_replaced(own: Decoders, raster: Path) -> None:
    """After SIGKILL of the fork server its children are gone, their scenes say so, and the next scene opens."""
    scene = own.open(raster, REQUEST)
    child, server = children_of(own)[0], fork_server_of(own)
    server.kill()
    assert until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(DecoderBusy):
        read_tile(scene, 0)
    scene.close()
    assert works(own, raster)
    assert fork_server_of(own).pid != server.pid


def test_a_fork_server_killed_again_and_again(own: Decoders, raster: Path) -> None:
    """An opening that races with the fork server's death still opens."""
    for _ in range(3):
        fork_server_of(own).kill()
        assert works(own, raster)


def test_closing_the_decoders_ends_all(raster: Path, folder: Path) -> None:
    """ForkServer and children end; an open scene fails with a refusal and can still be closed."""
    decoders = Decoders(2, 0.1, folder)
    scene = decoders.open(raster, REQUEST)
    server, child = fork_server_of(decoders), children_of(decoders)[0]
    decoders.close()
    assert not server.is_running()
    assert until(lambda: not child.is_running())
    with pytest.raises(DecoderBusy):
        read_tile(scene, 0)
    scene.close()
    with pytest.raises(RuntimeError, match="closed"):
        decoders.open(raster, REQUEST)


def test_the_gateway_dies(tmp_path: Path, raster: Path) -> None:
    """When the gateway is killed, fork server and child end by themselves."""
    code = (
        "import sys, time; from pathlib import Path; from baton_geo.raster.messages import SceneRequest;"
        "from baton_geo.raster.decoders import Decoders;"
        "d = Decoders(1, 1); s = d.open(Path(sys.argv[1]), SceneRequest.model_validate_json(sys.argv[2]));"
        "print('open', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(raster), REQUEST.model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as gateway:
        assert gateway.stdout is not None
        assert gateway.stdout.readline() == "open\n"
        family = psutil.Process(gateway.pid).children(recursive=True)
        assert len(family) == 2
        gateway.kill()
    assert until(lambda: not any(process.is_running() for process in family))


def test_sixteen_at_once(decoders: Decoders, tmp_path: Path) -> None:
    """Sixteen scenes of different sizes, places and contents at the same time: each gets its own answer."""

    def one(number: int) -> None:
        random = np.random.default_rng(number)
        pixels = random.integers(-9, 9, (1, 40 + 17 * number, 300 - 11 * number)).astype("int16")
        path = write_tiff(tmp_path / f"{number}.tif", pixels, crs=f"EPSG:{32601 + number}")
        for _ in range(3):
            with decoders.open(path, REQUEST) as scene:
                assert scene.info.crs == f"EPSG:{32601 + number}"
                products = run(scene, sign_model)
                assert products.mask is not None
                np.testing.assert_array_equal(read_tiff(products.mask)[0], pixels[0] > 0)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(16)))


def test_threads_share_a_scene(decoders: Decoders, raster: Path) -> None:
    """Eight threads that read and write the tiles of one scene make the right mask."""
    with decoders.open(raster, REQUEST) as scene:

        def one(tile: int) -> None:
            pixels = read_tile(scene, tile)
            assert pixels is not None
            scene.write(tile, sign_model(pixels))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(scene.info.tiles)))
        assert scene.finish().areas[1].pixels == 20_000
