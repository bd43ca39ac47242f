"""The values of the shared store are those of whoever can write there: each is verified or left out, by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.random_images import picture
from support.shared_fuzz import DEEP, listed, survive
from support.shared_stores import ENGINE, Machine, StoreServer, machine, servers, store_server

from baton.engines.transfers import TransferRequest
from baton.errors import HandoffImagesLost, HandoffNotFound
from baton.images.image import PlacedImage
from baton.library.handoff import Handoff, scope_of
from baton_kv.stores.base import StoreError

pytestmark = pytest.mark.fault("C25")


@pytest.fixture(params=servers)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreServer]:
    with store_server(request.param, tmp_path) as running:
        yield running


def row_of(record: Handoff) -> str:
    return f"baton:{{i}}:r:{record.id}"


def unreadable(one: Machine) -> float:
    return (
        one.metrics.registry.get_sample_value("baton_shared_store_errors_total", {"kind": "unreadable"})
        or 0.0
    )


def change(server: StoreServer, record: Handoff, part: str, **values: Any) -> None:
    """Change what a record says, as somebody would who has no secret, and make others look at it."""
    told = json.loads(server.client.hget(row_of(record), part)) | values
    server.client.hset(row_of(record), mapping={part: json.dumps(told), "rev": 100})
    server.client.zadd("baton:{i}:log", {record.id: server.client.incr("baton:{i}:seq")})


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("body", {"tenant": "thief"}),
        ("body", {"tokens": [1, 2, 3]}),
        ("body", {"translated_from": "A" * 32}),
        ("changes", {"expires_at": 1e12, "ttl_s": 1e12}),
        ("changes", {"pin": True}),
    ],
)
async def test_a_record_that_somebody_changed_is_no_handoff(
    part: str, values: dict[str, Any], server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record, other = await one.leave("victim"), await one.leave("victim")
    change(server, record, part, **values)
    for tenant in ("victim", "thief"):
        with pytest.raises(HandoffNotFound):
            await two.handoffs.get(record.id, tenant)
    assert (await listed(two, "victim"), await listed(two, "thief")) == ({other.id}, set())
    assert unreadable(two) > 0


async def test_a_copy_of_a_record_under_another_name_is_no_handoff(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = await one.leave("victim")
    copy = "B" * 32
    row = server.client.hgetall(row_of(record))
    row[b"body"] = row[b"body"].replace(record.id.encode(), copy.encode())
    server.client.hset(f"baton:{{i}}:r:{copy}", mapping=row)
    server.client.zadd("baton:{i}:log", {copy: server.client.incr("baton:{i}:seq")})
    with pytest.raises(HandoffNotFound):
        await two.handoffs.get(copy, "victim")
    assert await listed(two, "victim") == {record.id}


async def test_a_gateway_of_the_pool_changes_a_record_and_others_believe_it(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = await one.leave()
    await two.handoffs.change(await two.handoffs.get(record.id, "local"), {"label": "theirs"})
    assert (await one.handoffs.get(record.id, "local")).label == "theirs"
    assert unreadable(one) == unreadable(two) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("rev", b"many"), ("rev", b"\xff"), ("body", DEEP), ("changes", b'{"expires_at": NaN}'), ("seal", b"")],
)
async def test_one_bad_row_is_left_out_of_the_list_and_the_start(
    field: str, value: bytes, server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    bad, good = await one.leave(), await one.leave("another")
    server.client.hset(row_of(bad), field, value)
    server.client.zadd("baton:{i}:log", {bad.id: 10**6, b"\xff\xfe": 10**6 + 1})
    assert await listed(two, "local") == set()
    assert await listed(two, "another") == {good.id}
    three = machine(tmp_path / "three", server.url)
    assert await listed(three, "another") == {good.id}
    assert unreadable(three) > 0


async def test_an_entry_that_is_larger_than_its_record_says_is_not_fetched(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    small, large = await one.leave(), await one.leave(blocks=1000)
    files = one.pool.connection.file_key
    server.client.delete(files(small.key))
    server.client.copy(files(large.key), files(small.key))
    found = await two.handoffs.get(small.id, "local")
    with pytest.raises(StoreError, match="more than its record says"):
        two.storage.fetch(found, 5)


async def test_a_chunk_that_is_larger_than_a_chunk_is_not_read(server: StoreServer, tmp_path: Path) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    record = await one.leave()
    server.client.hset(one.pool.connection.file_key(record.key), "0", bytes(40 * 1024 * 1024))
    found = await two.handoffs.get(record.id, "local")
    before = server.client.info("stats")["total_net_output_bytes"]
    with pytest.raises(StoreError):
        two.storage.fetch(found, 5)
    assert server.client.info("stats")["total_net_output_bytes"] - before < 1024 * 1024


async def test_an_image_that_is_larger_than_its_record_says_is_not_read(
    server: StoreServer, tmp_path: Path
) -> None:
    one, two = machine(tmp_path / "one", server.url), machine(tmp_path / "two", server.url)
    image = picture(20)
    record = one.handoffs.begin(ENGINE, "local")
    one.entry(record.key)
    one.handoffs.end(record, TransferRequest(images=[PlacedImage(image, 2, 4, (9,))]), range(64))
    await one.handoffs.settled(record, 20)
    await one.quiet()
    (digest,) = {each.digest for each in record.images}
    key = one.pool.connection.file_key(f"{scope_of('local')}/m{digest}")
    server.client.hset(
        key, mapping={"n": 40 * 1024 * 1024} | {str(each): bytes(1024 * 1024) for each in range(40)}
    )
    before = server.client.info("stats")["total_net_output_bytes"]
    with pytest.raises(HandoffImagesLost):
        await two.handoffs.images(await two.handoffs.get(record.id, "local"))
    assert server.client.info("stats")["total_net_output_bytes"] - before < 1024 * 1024


async def test_a_circle_of_translations_ends(tmp_path: Path) -> None:
    with store_server("valkey", tmp_path) as server:
        one = machine(tmp_path / "one", server.url)
        first, second = await one.leave(), await one.leave()
        vars(first)["translated_from"], vars(second)["translated_from"] = second.id, first.id
        for record in (first, second):
            async with asyncio.timeout(10):
                with pytest.raises(HandoffNotFound):
                    await one.handoffs.get(record.id, "local")
        alone = await one.leave(translated_from=first.id)
        async with asyncio.timeout(10):
            with pytest.raises(HandoffNotFound):
                await one.handoffs.get(alone.id, "local")


async def test_whatever_stands_in_the_store_gateways_start_list_and_sweep(
    server: StoreServer, tmp_path: Path
) -> None:
    await survive(server, tmp_path, 150, seed=1)
