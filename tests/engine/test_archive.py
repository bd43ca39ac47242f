"""What a machine computed and pinned is loaded by another one, after the first was wiped, from a real S3 server."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.archives import BUCKET, Archive, archive_server, with_s3
from support.gateways import RealGateway
from support.relays import DOCUMENT, ask, cached, ids, once_saved, told

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    with_s3,
]
CONFIG = Path(__file__).with_name("archive_engines.toml")


@contextmanager
def gateway(folder: Path, archive: Archive) -> Iterator[RealGateway]:
    """A gateway that starts with whatever is in its folder."""
    folder.mkdir(exist_ok=True)
    secret, config = folder.parent / "secret", folder / "baton.toml"
    secret.write_text("the secret that outlives all of these machines")
    config.write_text(
        CONFIG.read_text().format(
            folder=folder, bucket=BUCKET, endpoint=archive.endpoint, key=archive.key_file, secret=secret
        )
    )
    with RealGateway(["--config", str(config)], folder) as running:
        running.wait_until_ready()
        yield running


def saved_in_the_archive(running: RealGateway, archive: Archive) -> dict[str, Any]:
    """Save a pinned handoff, and wait until the archive has it."""
    saved = once_saved(running, told(ask(running, "smollm2", DOCUMENT, handoff={"save": {"pin": True}})))
    assert saved["pin"] is True
    deadline = time.monotonic() + 60
    with running.client() as client:
        while not client.get(f"/v1/handoffs/{saved['id']}").json()["archived"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert len(archive.names("records")) == 1
    return saved


def require_loaded(relayed: dict[str, Any], saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Require that all but one token came from the handoff, and the answer is the one that it gave before."""
    source = told(relayed)["source"]
    assert (source["outcome"], source["loaded_tokens"]) == ("loaded", saved["tokens"] - 1)
    assert cached(relayed) == saved["tokens"] - 1
    assert ids(relayed) == ids(here)


@pytest.mark.fault("C16")
def test_b_loads_from_the_archive_what_its_machine_has_lost(tmp_path: Path) -> None:
    with archive_server(tmp_path / "s3") as archive, gateway(tmp_path / "machine", archive) as running:
        saved = saved_in_the_archive(running, archive)
        here = ask(running, "smollm2", " In the end", handoff={"from": saved["id"]})
        assert told(here)["source"]["outcome"] == "loaded"
        store = tmp_path / "machine/store"
        for folder in ("entries", "records"):
            for each in (path for path in (store / folder).rglob("*") if path.is_file()):
                each.unlink()
        relayed = ask(running, "smollm2", " In the end", handoff={"from": saved["id"]})
        require_loaded(relayed, saved, here)
        assert list((store / "entries").rglob("*.kv"))  # it is on the machine again
        plain = ask(running, "smollm2", ids(relayed)[0])
        assert (ids(relayed)[1], cached(plain)) == (ids(plain)[1], 0)
        archive.kill()
        again = ask(running, "smollm2", " In the end", handoff={"from": saved["id"]})
        assert told(again)["source"]["outcome"] == "loaded"
        with running.client() as client:
            unknown = client.get("/v1/handoffs/" + "x" * 32)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "handoff_store_unavailable")
        assert "archive" in unknown.json()["error"]["message"]


@pytest.mark.chaos
def test_b_loads_from_the_archive_what_a_saved_on_a_machine_that_is_no_more(tmp_path: Path) -> None:
    with archive_server(tmp_path / "s3") as archive:
        with gateway(tmp_path / "machine", archive) as first:
            saved = saved_in_the_archive(first, archive)
            here = ask(first, "smollm2", " In the end", handoff={"from": saved["id"]})
        shutil.rmtree(tmp_path / "machine")
        with gateway(tmp_path / "machine", archive) as second:
            began = time.monotonic()
            relayed = ask(second, "smollm2", " In the end", handoff={"from": saved["id"]})
            assert time.monotonic() - began < 60
            require_loaded(relayed, saved, here)
