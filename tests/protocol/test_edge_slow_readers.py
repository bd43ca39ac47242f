"""Clients that read their answer slowly or not at all: they are cut off, unless they keep reading."""

from __future__ import annotations

import contextlib
import time

import pytest
from support.gateways import run_fake
from support.raw_requests import (
    TEXT,
    good_traffic,
    metric,
    open_connections,
    peak_rss,
    slow_reader,
    small_buffers,
    traffic_beside,
    wait_for,
)

from baton.engines.fake.engine import FakeEngine

LONG_WORD = "w" * 20_000


@pytest.mark.fault("E3")
def test_slow_readers_are_cut_off_and_their_engine_requests_freed() -> None:
    streams = 100
    endless = {"prompt": "w" * 2000, "max_tokens": 150, "stream": True}  # the fake engine holds it all
    with run_fake(FakeEngine("a"), edge={"send_s": 2}) as gateway, gateway.client() as client:
        small_buffers(gateway)
        engine = gateway.engine("a")
        with peak_rss() as risen:
            readers = [slow_reader(gateway, endless) for _ in range(streams)]
            began = time.monotonic()
            assert client.post("/v1/completions", json=TEXT).status_code == 200  # after all that fits buffers
            with traffic_beside() as idle, good_traffic(gateway) as good:
                counted = 'baton_client_disconnects_total{phase="slow_reader"}'
                with contextlib.suppress(
                    ConnectionResetError
                ):  # on a machine that takes two seconds for this
                    while time.monotonic() - began < 1:
                        for reader in readers:
                            reader.recv(1)
                        time.sleep(0.2)
                wait_for(lambda: metric(gateway, counted) == streams, "slow readers stay")
                seconds = time.monotonic() - began
            wait_for(lambda: engine.active == 0, "an engine request is left")
        for reader in readers:
            reader.close()
        assert engine.aborted == streams
        wait_for(lambda: open_connections(gateway) <= 1, "a connection is left")
        each = risen() * 1024 / streams
        print(f"E3: {streams} readers of some bytes/s cut off after {seconds:.1f} s of 2, ", end="")
        print(f"{each:.0f} KiB each, engine free, good traffic's p99 {good.p99:.0f} ms ({idle.p99:.0f} idle)")
        assert each < 1024
        good.assert_like(idle)


@pytest.mark.fault("E3")
def test_the_unread_rest_of_a_finished_answer_is_not_kept_for_ever() -> None:
    """The answer is smaller than asyncio's buffer: nothing pauses, yet the connection cannot end."""
    with run_fake(FakeEngine("a"), edge={"send_s": 0.5}) as gateway:
        gateway.server.config.timeout_keep_alive = 0.2  # type: ignore[assignment]  # until it is to end: uvicorn's 5 s
        small_buffers(gateway)
        whole = {"prompt": LONG_WORD, "max_tokens": 4}
        readers = [slow_reader(gateway, whole) for _ in range(20)]
        counted = 'baton_client_disconnects_total{phase="slow_reader"}'
        wait_for(lambda: metric(gateway, counted) == len(readers), "they stay")
        wait_for(lambda: open_connections(gateway) <= 1, "a connection is left")
        for reader in readers:
            reader.close()


def read_slowly(send_s: float) -> tuple[bytes, float, float]:
    """An answer that takes more than twice `send_s` to read, as far as it came; the seconds it took; and the
    longest pause of the reader's own, which a busy machine may make longer than it meant.
    """
    with run_fake(FakeEngine("a"), edge={"send_s": send_s}) as gateway:
        small_buffers(gateway)
        with slow_reader(gateway, {"prompt": LONG_WORD, "max_tokens": 100, "stream": True}) as reader:
            answer, began, longest = b"", time.monotonic(), 0.0
            read = began
            while not answer.endswith(b"0\r\n\r\n"):
                with contextlib.suppress(ConnectionResetError):
                    part = b""
                    part = reader.recv(16384)
                longest, read = max(longest, time.monotonic() - read), time.monotonic()
                if not part:
                    break
                answer += part
                time.sleep(send_s / 40 if read - began < 2.5 * send_s else 0)
    return answer, read - began, longest


@pytest.mark.fault("E3")
def test_a_slow_reader_that_keeps_reading_may_finish() -> None:
    """Where the machine keeps the reader from it for a good part of the deadline, a longer one is tried."""
    for send_s in (0.4, 1.6, 6.4):
        answer, seconds, longest = read_slowly(send_s)
        print(f"E3: read for {seconds:.1f} s with a deadline of {send_s}, longest pause {longest:.2f} s")
        if longest < send_s / 2:
            break
    assert seconds > 2 * send_s
    assert answer.endswith(b"0\r\n\r\n"), "it was cut off"
    assert answer.count(LONG_WORD.encode()) == 100
