"""What handoffs take that is no KV: records and images count in the budget by their bytes on disk."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.config.groups import HandoffSettings
from baton.engines.backend import ImageInput
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferReport, TransferRequest
from baton.errors import HandoffNotFound, HandoffPinsFull
from baton.images.image import ClientImage, PlacedImage
from baton.library.handoff import MAX_CONVERSATION_BYTES, Context, Handoff, HandoffState
from baton.library.here.images import ImageStore
from baton.library.here.records import RecordFolder
from baton.library.library import Library
from baton.library.tiers import Here
from baton.relay.prompt.chat import AFTER_THE_PROMPT, conversation_of
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.contract import new_key
from baton_kv.stores.file import FileStore

ENGINE = FakeEngine("a", supports_handoffs=True, images=ImageInput(limit=4))
MIB = 1024 * 1024
CHATS = 12
SCRIPTS = {"latin": "x", "control": "\x01", "han": "\u6c49", "emoji": "\U0001f600", "half": "\ud83d"}


def gateway(folder: Path, budget: int = 8 * MIB) -> Library:
    root = folder / "store"
    storage = Here(
        FileStore(root, budget=budget), RecordFolder(root / "records"), ImageStore(root / "images")
    )
    return Library(HandoffSettings(budget=budget), storage, HandoffMetrics(CollectorRegistry()))  # type: ignore[arg-type]  # a number is a size


async def left(
    handoffs: Library,
    text: str,
    tenant: str = "local",
    *,
    images: list[PlacedImage] | None = None,
    **more: Any,
) -> Handoff:
    record = handoffs.begin(ENGINE, tenant, **more)
    body = {"messages": [{"role": "user", "content": text}]}
    context = Context(conversation_of(body, AFTER_THE_PROMPT))
    transfer = TransferRequest(report=TransferReport(saves=False), images=images or [])
    handoffs.end(record, transfer, [1, 2, 3], context)
    await asyncio.gather(*handoffs.background.running)
    assert record.state is HandoffState.READY
    return record


def taken(folder: Path) -> int:
    """Bytes of every file of the store."""
    return sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())


async def there(handoffs: Library, record: Handoff) -> bool:
    try:
        await handoffs.get(record.id, record.tenant)
    except HandoffNotFound:
        return False
    return True


@pytest.mark.fault("B13")
@pytest.mark.parametrize("script", SCRIPTS)
async def test_long_chats_of_any_script_stay_within_the_budget(script: str, tmp_path: Path) -> None:
    handoffs = gateway(tmp_path)
    records = [await left(handoffs, SCRIPTS[script] * (MIB - 1000)) for _ in range(CHATS)]
    largest = max(path.stat().st_size for path in (tmp_path / "store" / "records").iterdir())
    total = taken(tmp_path)
    print(f"\nB13 {script}: {CHATS} chats take {total / MIB:.1f} MiB of 8, the largest {largest / MIB:.1f}")
    assert total <= 4 * MIB
    assert largest <= MAX_CONVERSATION_BYTES + 64 * 1024
    assert await there(handoffs, records[-1])
    assert not (records[-1].conversation and records[-1].conversation.text_only) or script != "latin"


@pytest.mark.fault("B13")
async def test_records_over_their_room_cost_the_largest_tenant_its_oldest(tmp_path: Path) -> None:
    handoffs, text = gateway(tmp_path), "x" * (MIB // 2)
    small = await left(handoffs, text, "globex")
    pinned = await left(handoffs, text, "acme", pin=True)
    acme = [await left(handoffs, text, "acme") for _ in range(8)]
    assert await there(handoffs, small)
    assert await there(handoffs, pinned)
    assert [await there(handoffs, record) for record in acme] == [False] * 3 + [True] * 5
    again = gateway(tmp_path)
    assert [await there(again, record) for record in acme] == [False] * 3 + [True] * 5


@pytest.mark.fault("B13")
async def test_kv_makes_room_for_records_and_a_put_counts_them(tmp_path: Path) -> None:
    handoffs, text = gateway(tmp_path), "x" * MIB
    store, keys = FileStore(tmp_path / "store", budget=8 * MIB), [new_key("local") for _ in range(8)]
    for key in keys:
        store.put(key, [bytes(MIB - 1)])
    for number in range(3):
        await left(handoffs, text[: MIB // 2])
        assert store.size() <= 8 * MIB
        assert sum(store.exists(key) for key in keys) == (7, 6, 6)[number]
    store.put(new_key("local"), [bytes(MIB)])
    assert store.size() <= 8 * MIB
    assert taken(tmp_path) <= 8 * MIB + 100


@pytest.mark.fault("B12")
@pytest.mark.fault("B13")
async def test_two_gateways_keep_one_budget_and_each_evicts_the_largest_tenant_s(tmp_path: Path) -> None:
    gateways, text = (gateway(tmp_path), gateway(tmp_path)), "x" * (MIB // 4)
    quiet = [await left(gateways[0], text, "quiet") for _ in range(3)]
    quiet_pin = await left(gateways[0], text, "quiet", pin=True)
    for number in range(40):
        await left(gateways[number % 2], text, "loud", pin=number % 3 == 0)
        assert taken(tmp_path) <= 4 * MIB + 100
    for each in gateways:
        assert [await there(each, record) for record in (*quiet, quiet_pin)] == [True] * 4
    page, _ = await gateways[0].page("loud", limit=100, after=None)
    pinned = sum(record.footprint.non_kv_bytes for record in page if record.pin)
    assert 0 < pinned <= 2 * MIB, "a quarter of the budget: half, for two tenants"


async def test_nobody_s_handoffs_go_for_one_that_does_not_fit_all_the_same(tmp_path: Path) -> None:
    def picture(size: int) -> list[PlacedImage]:
        file = ClientImage(b"i" * size, "image/png", 4, 4)
        return [PlacedImage(file, 0, 1, (7,))]

    handoffs = gateway(tmp_path)
    others = [await left(handoffs, "x") for _ in range(3)]
    await left(handoffs, "x", images=picture(5 * MIB))
    pinned = await left(handoffs, "x", images=picture(2 * MIB - 64 * 1024), pin=True)
    assert pinned.pin
    second = await left(handoffs, "y", images=picture(2 * MIB - 32 * 1024))
    with pytest.raises(HandoffPinsFull):
        await handoffs.change(second, {"pin": True})
    await left(handoffs, "z", images=picture(4 * MIB - 1024))
    assert [await there(handoffs, record) for record in (*others, pinned)] == [True] * 4


@pytest.mark.fault("B13")
async def test_pins_count_records_and_images_too(tmp_path: Path) -> None:
    handoffs = gateway(tmp_path)
    picture = ClientImage(b"i" * 1400 * 1024, "image/png", 4, 4)
    seen = [PlacedImage(picture, 0, 1, (7,))]
    await left(handoffs, "x", "globex")  # so that the share is a quarter
    first = await left(handoffs, "x" * (MIB // 2), images=seen)
    second = await left(handoffs, "x" * (MIB // 4))
    await handoffs.change(first, {"pin": True})
    with pytest.raises(HandoffPinsFull):
        await handoffs.change(second, {"pin": True, "label": "x"})
    assert second.label is None, "a change that is refused changes nothing"
    await handoffs.change(first, {"pin": False})
    await handoffs.change(second, {"pin": True})


DEEP: dict[str, Any] = {
    "emoji": {"role": "user", "content": "a" * 500_000 + "\U0001f600"},
    "lists": {"role": "user", "content": [[] for _ in range(20_000)]},
    "objects": {"role": "user", "content": [{"a": {}} for _ in range(8_000)]},
}


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.fault("B13")
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("shape", DEEP)
async def test_a_handoff_s_weight_is_what_it_takes_in_memory(shape: str, tmp_path: Path) -> None:
    written = json.dumps({"messages": [DEEP[shape]]})
    handoffs = gateway(tmp_path)
    record = handoffs.begin(ENGINE, "local")
    before = tracemalloc.get_traced_memory()[0]
    context = Context(conversation_of(json.loads(written), None))
    taken = tracemalloc.get_traced_memory()[0] - before
    handoffs.end(record, TransferRequest(report=TransferReport(saves=False)), array("i", range(50)), context)
    await asyncio.gather(*handoffs.background.running)
    again = (await gateway(tmp_path).get(record.id, "local")).weight
    print(f"\nB13 {shape}: {taken} bytes in memory, weight {record.weight}, {again} after a restart")
    assert min(record.weight, again) >= 0.9 * taken


@pytest.mark.fault("B7")
async def test_a_store_that_cannot_be_counted_costs_no_handoff_its_answer_and_no_other_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handoffs = gateway(tmp_path)
    kept = await left(handoffs, "x" * 1000)

    def broken(_files: ImageStore) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(ImageStore, "size", broken)
    record = await left(handoffs, "x" * 1000, pin=True)
    assert (record.on_disk, record.pin) == (False, True)
    assert [await there(handoffs, each) for each in (kept, record)] == [True, True]


async def test_a_change_whose_client_is_gone_is_made_whole(tmp_path: Path) -> None:
    handoffs = gateway(tmp_path)
    for number in range(20):
        record, gone = await left(handoffs, "x"), await left(handoffs, "x")
        work = [
            asyncio.create_task(handoffs.change(record, {"label": f"label {number}"})),
            asyncio.create_task(handoffs.delete(gone)),
        ]
        await asyncio.sleep(0)
        for each in work:
            each.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await asyncio.gather(*handoffs.background.running)
        assert record.label == f"label {number}"
        again = gateway(tmp_path)
        assert (await again.get(record.id, "local")).label == record.label
        assert not await there(again, gone)
