"""`baton doctor` says of a real S3 bucket what would go wrong with it, and what to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.archives import BUCKET, Archive, archived_machine, with_s3
from support.s3_proxy import S3Proxy, s3_proxy
from support.shared_stores import SECRET

from baton.config.settings import Settings
from baton.doctor import archive as doctor_archive
from baton.doctor.archive import examine_archive
from baton.doctor.findings import Finding

pytestmark = with_s3
DENIED = """<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Error><Key>KEY</Key>
<Code>AccessDenied</Code><Message>Access Denied</Message></Error></DeleteResult>"""
"""How S3 refuses to delete: the answer as a whole is good."""


@pytest.fixture
def proxy(archive: Archive) -> Iterator[S3Proxy]:
    with s3_proxy(archive.endpoint) as running:
        yield running


def examine(folder: Path, archive: Archive, secret: str = SECRET, **settings: Any) -> dict[str, Finding]:
    (folder / "secret").write_text(secret)
    given = {
        "archive": f"s3://{BUCKET}/baton",
        "archive_endpoint": archive.endpoint,
        "archive_key_file": archive.key_file,
        "archive_timeout_s": 1,
        "shared_secret_file": folder / "secret",
    }
    chosen = Settings(handoffs=given | settings)
    return {finding.subject: finding for finding in examine_archive(chosen)}


def test_a_bucket_that_is_well_set_up_is_measured_and_left_clean(tmp_path: Path, archive: Archive) -> None:
    found = examine(tmp_path, archive)
    assert not [each for each in found.values() if each.bad]
    assert "written, listed, read and deleted" in found["archive"].text
    assert "fetch" in found["archive throughput"].text
    assert "agrees" in found["archive clock"].text
    assert not archive.names("files/doctor")


def test_another_secret_is_told(tmp_path: Path, archive: Archive) -> None:
    assert "no gateway" in examine(tmp_path, archive)["archive secret"].text
    archived_machine(tmp_path / "one", archive).close()
    assert not examine(tmp_path, archive)["archive secret"].bad
    told = examine(tmp_path, archive, "another secret of at least 32 characters")["archive secret"]
    assert (told.bad, "another secret" in told.text) == (True, True)
    archive.delete("gateways")


def test_missing_files_are_told(tmp_path: Path, archive: Archive) -> None:
    for setting in ("archive_key_file", "shared_secret_file"):
        told = examine(tmp_path, archive, **{setting: tmp_path / "none"})["archive"]
        assert (told.bad, setting in told.text) == (True, True)


def test_credentials_that_may_not_list_are_told(tmp_path: Path, archive: Archive) -> None:
    told = examine(tmp_path, archive, archive_key_file=archive.key_file.with_name("few"))
    assert told["archive list"].bad
    assert "AccessDenied" in told["archive list"].text
    assert "s3:ListBucket" in told["archive list"].mend


@pytest.mark.parametrize(
    ("lines", "says", "mend"),
    [
        ("AKIDTESTSONLY\nwrong", "SignatureDoesNotMatch", "correct the access key's secret"),
        ("AKIDUNKNOWN\nwrong", "InvalidAccessKeyId", "correct the access key's id"),
    ],
)
def test_wrong_credentials_are_told_and_not_shown(
    lines: str, says: str, mend: str, tmp_path: Path, archive: Archive
) -> None:
    (tmp_path / "key").write_text(lines)
    (told,) = examine(tmp_path, archive, archive_key_file=tmp_path / "key").values()
    assert told.bad
    assert says in told.text
    assert mend in told.mend
    assert "AKID" not in told.text + told.mend


@pytest.mark.parametrize(
    ("method", "status", "code", "subject", "mend"),
    [
        ("PUT", 404, "NoSuchBucket", "archive write", "create it"),
        ("PUT", 403, "RequestTimeTooSkewed", "archive write", "clock"),
        ("PUT", 403, "QuotaExceeded", "archive write", "raise the quota"),
        ("GET", 403, "AccessDenied", "archive read", "s3:GetObject"),
        ("POST", 403, "AccessDenied", "archive delete", "s3:DeleteObject"),
        ("POST", 200, DENIED, "archive delete", "s3:DeleteObject"),
    ],
)
def test_each_refusal_is_told_with_its_mend(
    method: str,
    status: int,
    code: str,
    subject: str,
    mend: str,
    tmp_path: Path,
    archive: Archive,
    proxy: S3Proxy,
) -> None:
    proxy.refuse = lambda asked, _: (status, code) if asked == method else None
    told = examine(tmp_path, archive, archive_endpoint=proxy.endpoint)[subject]
    assert told.bad
    assert (code if status != 200 else "not allowed") in told.text
    assert mend in told.mend


def test_an_answer_that_the_client_chokes_on_is_a_failure(
    tmp_path: Path, archive: Archive, proxy: S3Proxy
) -> None:
    proxy.refuse = lambda method, _: (200, DENIED.replace("KEY", "another")) if method == "POST" else None
    assert examine(tmp_path, archive, archive_endpoint=proxy.endpoint)["archive delete"].bad


def test_a_service_that_ignores_conditions_is_told(tmp_path: Path, archive: Archive, proxy: S3Proxy) -> None:
    proxy.refuse = lambda method, _: (200, "<Ok/>") if method == "PUT" and len(proxy.seen) > 2 else None
    told = examine(tmp_path, archive, archive_endpoint=proxy.endpoint)["archive write over a version"]
    assert told.bad
    assert "If-None-Match" in told.text


def test_a_slow_a_hanging_and_a_dead_service_are_told_apart(
    tmp_path: Path, archive: Archive, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_archive, "ROUND_TRIPS", 2)
    proxy.refuse = lambda method, _: time.sleep(0.3) if method == "GET" else None
    slow = examine(tmp_path, archive, archive_endpoint=proxy.endpoint, archive_timeout_s=0.55)
    assert slow["archive round trip"].bad
    assert "nearer" in slow["archive round trip"].mend
    with archive.stopped():
        (told,) = examine(tmp_path, archive, archive_timeout_s=0.3).values()
    assert "in time" in told.text
    (told,) = examine(tmp_path, archive, archive_endpoint="http://127.0.0.1:1").values()
    assert "cannot be reached" in told.text
