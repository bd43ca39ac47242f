"""What all tests share: a clean environment, and gateways to talk to."""

from __future__ import annotations

import functools
import gc
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx._transports.default  # by its name: there is no other door to the context of a client without one
import pytest
import structlog
from engine import geo_models
from support.archives import Archive, archive_server
from support.gateways import FakeGateway, RealGateway, run_fake
from support.made_models import make_models
from support.raster_host import RasterHost
from support.trace_collector import EXPORTER, Collector
from support.wheel_environment import CPU_LOCK, TORCH_LOCK, WheelEnvironment, build

from baton.admission.api_keys import create_key
from baton.config.settings import load_settings
from baton.engines.fake.engine import FakeEngine
from baton.models.store import ModelStore

ENGINE_TESTS = Path(__file__).parent / "engine"
SHARED_GATEWAYS = ("real_gateway", "tiny_gateway", "relay_gateway", "geo_gateway", "vision_gateway")
ENGINES = "engines: "
"""What the names of those groups of tests begin with that have engines."""
TOGETHER = {"/seams/": "seams", "/tests/plain/": f"{ENGINES}plain"}
"""Folders whose files run in one process: what vLLM imports on its first use, and plain vLLM's servers, are had once."""
HAVE_ENGINES = ("mark.engine", "RealGateway", "OfflineEngine")
"""What a file names whose tests have engines."""
LAST_USERS: pytest.StashKey[dict[str, pytest.Item]] = pytest.StashKey()


class Nowhere(io.TextIOBase):
    """Takes what is written, and keeps none of it."""

    def write(self, text: str) -> int:
        return len(text)


def pytest_configure() -> None:
    """The access log of gateways in this process goes nowhere; their threads outlive a test's capture."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(Nowhere()))
    # Each client of httpx reads the certificate authorities anew, 25 ms of a core; tests make thousands of clients.
    transports = httpx._transports.default
    transports.create_ssl_context = functools.cache(transports.create_ssl_context)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Several processes share the cores. Threads of one engine would wait for one another while another's run: with one
        # each, which may run anywhere, engines do the same in three quarters of the time.
        import torch

        torch.set_num_threads(1)
        os.environ.update(OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, a fifth of whose time that took; nor look at them again later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the last test of each shared gateway."""
    session.stash[LAST_USERS] = {
        name: item
        for item in session.items
        for name in getattr(item, "fixturenames", ())
        if name in SHARED_GATEWAYS
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest first, so that no process has one of them left at the end.

    Those are in the folders of chaos and of vision; then come others with engines, and the seams', which one process runs.
    """

    def place(item: pytest.Item) -> tuple[bool, ...]:
        folders = item.path.parts
        return (
            "chaos" not in folders,
            "vision" not in folders,
            not has_engines(item.path),
            "seams" not in folders,
        )

    items.sort(key=place)


@functools.cache
def has_engines(file: Path) -> bool:
    """Whether a file's tests have engines of vLLM, by what it names."""
    text = file.read_text()
    return any(name in text for name in (*SHARED_GATEWAYS, *HAVE_ENGINES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give all files that name a shared gateway to one process of pytest-xdist, and some folders; the others file by file.

    Two processes run engines, whose memory is what a machine has least of; a third runs all else meanwhile, since
    tests with engines leave some of the processors idle.
    """
    from xdist.scheduler import LoadScopeScheduling  # where the tests run in one process it is not needed
    from xdist.workermanage import WorkerController

    @functools.cache
    def group(file: str) -> str:
        if together := next((name for folder, name in TOGETHER.items() if folder in f"/{file}"), None):
            return together
        path = config.rootpath / file
        text = path.read_text()
        shared = next((name for name in SHARED_GATEWAYS if name in text), file)
        return f"{ENGINES}{shared}" if has_engines(path) else file

    class GatewayScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid.partition("::")[0])

        def _reschedule(self, node: WorkerController) -> None:
            if self._is_for(node):
                super()._reschedule(node)
            elif not node.shutting_down:
                node.shutdown()

        def _assign_work_unit(self, node: WorkerController) -> None:
            if (scope := self._is_for(node)) is not None:
                self.workqueue.move_to_end(scope, last=False)
                super()._assign_work_unit(node)

        def _is_for(self, node: WorkerController) -> str | None:
            """Return the first of the waiting scopes that a process may take."""
            engines_too = node in self.nodes[:2]
            return next(
                (scope for scope in self.workqueue if engines_too or not scope.startswith(ENGINES)), None
            )

    return GatewayScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Function) -> None:
    """End a shared gateway with its last test, not with the run: its engines' memory is wanted by others."""
    for name, last in item.session.stash[LAST_USERS].items():
        gateway = item.funcargs.get(name) if last is item else None
        # After the run's last test the fixture has ended it already.
        if isinstance(gateway, RealGateway) and gateway.process.poll() is None:
            gateway.stop()


def joined(folder: Path) -> str:
    """`PYTHONPATH` with a folder before what it holds already: the tree that is tested may be there."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What runs the tests that are coroutines: asyncio, as the gateway does."""
    return "asyncio"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No setting of the person who runs the tests reaches them."""
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "data"))


@pytest.fixture(scope="session")
def archive_started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    """An S3 server that the tests share which do not kill theirs: it needs seconds to start."""
    with archive_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def archive(archive_started: Archive) -> Archive:
    """An S3 server with an empty bucket."""
    archive_started.empty()
    return archive_started


@pytest.fixture
def fake_gateway() -> Iterator[FakeGateway]:
    """A gateway with two fake engines and a fake pooling engine, on a real socket, of this test alone."""
    with run_fake(FakeEngine("alpha"), FakeEngine("beta"), FakeEngine("embed", pooling=True)) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def real_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    """`baton serve` with two engines on SmolLM2's real weights and the shipped geospatial one, for the whole run."""
    config = ENGINE_TESTS / "two_engines.toml"
    folder = tmp_path_factory.mktemp("gateway")
    store = {"BATON_HANDOFFS__STORE": f"file:{folder / 'handoffs'}"}
    with RealGateway(["--config", str(config)], folder, store, forked=True) as gateway:
        gateway.wait_until_ready()
        yield gateway


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where `tiny_gateway`'s generating engine sends its traces."""
    with Collector() as running:
        yield running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that generates, with SmolLM2's tokenizer."""
    return make_models(ENGINE_TESTS / "tiny.py", tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_gateway(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector, tiny_model: Path
) -> Iterator[RealGateway]:
    """`baton serve` with keys for two tenants, a generating and an embedding engine, both on a tiny random model."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "model").symlink_to(tiny_model)
    config = (ENGINE_TESTS / "tiny_engines.toml").read_text()
    (folder / "baton.toml").write_text(config.format(folder=folder, traces=collector.url))
    keys = {tenant: create_key(folder / "keys.json", tenant) for tenant in ("acme", "globex")}
    with RealGateway(["--config", str(folder / "baton.toml")], folder, EXPORTER, forked=True) as gateway:
        gateway.keys = keys
        gateway.wait_until_ready()
        yield gateway


@pytest.fixture(scope="session")
def relay_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The settings of `relay_gateway`; its store lies in the folder beside them."""
    folder = tmp_path_factory.mktemp("relay")
    look = ModelStore(load_settings().models_folder).resolve("look-tiny")
    shutil.copytree(look, folder / "other-look")
    (folder / "other-look" / "README.md").write_text("A fine-tune, as far as anybody knows.")
    text = (ENGINE_TESTS / "relay_engines.toml").read_text()
    (folder / "baton.toml").write_text(text.format(folder=folder))
    return folder / "baton.toml"


@pytest.fixture(scope="session")
def relay_gateway(relay_config: Path) -> Iterator[RealGateway]:
    """`baton serve` with three engines that hand over and take latent steps, on SmolLM2's real weights in fp32.

    And two of another model under two names, with the same weights: no KV may cross between these.
    """
    path = {"PYTHONPATH": joined(ENGINE_TESTS)}  # where the slow connector is
    with RealGateway(["--config", str(relay_config)], relay_config.parent, path, forked=True) as gateway:
        gateway.wait_until_ready()
        yield gateway


@pytest.fixture(scope="session")
def geo_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Where `geo_gateway` has its models, its classic plugin, its platform and the rasters it may read."""
    folder = tmp_path_factory.mktemp("geo")
    (folder / "text").symlink_to(tiny_model)
    geo_models.make(folder / "rgb", ("RED", "GREEN", "BLUE"))
    plugins = [str(Path(__file__).parent / "plugins" / name) for name in ("classic_echo", "house_platform")]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "packages")]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *options, *plugins], check=True, capture_output=True
    )
    (folder / "rasters").mkdir()
    (folder / "spool").mkdir()
    return folder


@pytest.fixture(scope="session")
def raster_host() -> Iterator[RasterHost]:
    """A web server of files, on loopback, that counts who connects."""
    with RasterHost() as host:
        yield host


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel, as they would be published."""
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def wheel_environment(
    distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> WheelEnvironment:
    """Plain vLLM with all it needs, and of Baton the wheel."""
    environment = WheelEnvironment(tmp_path_factory.mktemp("wheel") / "venv", CPU_LOCK, TORCH_LOCK)
    environment.install(distributions[1])
    return environment


@pytest.fixture(scope="session")
def geo_gateway(geo_folder: Path, raster_host: RasterHost) -> Iterator[RealGateway]:
    """`baton serve` with a small random geospatial model and a plugin of older vLLM, on a platform of the tests' own."""
    text = (ENGINE_TESTS / "geo_engines.toml").read_text()
    (geo_folder / "baton.toml").write_text(text.format(folder=geo_folder, port=raster_host.port))
    environment = {"PYTHONPATH": joined(geo_folder / "packages"), "TMPDIR": str(geo_folder / "spool")}
    # Not forked: vLLM has chosen its platform by the time that it has been imported.
    with RealGateway(["--config", str(geo_folder / "baton.toml")], geo_folder, environment) as gateway:
        gateway.wait_until_ready()
        yield gateway
