from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from baton.api.auth import presented_key
from baton.api.keys import LOOK_EVERY_S, Keyring, KeysFile, create_key, read_keys, revoke_key
from baton.errors import SettingsError


def test_a_created_key_opens_and_is_nowhere_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "keys.json"
    key = create_key(file, "acme")
    assert Keyring(read_keys(file)).tenant(key) == "acme"
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_revoked_key_no_longer_opens_and_others_do(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    first, second = create_key(file, "acme"), create_key(file, "globex")
    revoke_key(file, read_keys(file)[0].id)
    keyring = Keyring(read_keys(file))
    assert (keyring.tenant(first), keyring.tenant(second)) == (None, "globex")


def test_revoking_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no key with the id"):
        revoke_key(tmp_path / "keys.json", "nope")


def test_keys_made_at_the_same_time_all_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    threads = [threading.Thread(target=create_key, args=(file, f"t{number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.tenant for key in read_keys(file)} == {f"t{number}" for number in range(8)}


@pytest.mark.parametrize("tenant", ["", "a b", "../x", "x" * 65, "a\n"])
def test_a_tenant_has_a_plain_name(tmp_path: Path, tenant: str) -> None:
    with pytest.raises(SettingsError):
        create_key(tmp_path / "keys.json", tenant)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text("{}")
    with pytest.raises(SettingsError, match="not a keys file"):
        read_keys(file)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"authorization", b"Bearer abc")], "abc"),
        ([(b"authorization", b"bearer  abc ")], "abc"),
        ([(b"authorization", b"Basic abc")], ""),
        ([(b"authorization", b"abc")], ""),
        ([(b"x-api-key", b"abc")], "abc"),
        ([], ""),
    ],
)
def test_a_key_is_taken_as_openai_and_anthropic_clients_send_it(
    headers: list[tuple[bytes, bytes]], key: str
) -> None:
    assert presented_key(headers) == key


def test_g3_a_running_gateway_follows_its_keys_file(tmp_path: Path) -> None:
    """Keys made and revoked count within a second; a broken file changes nothing, one that is gone closes it."""
    file, now = tmp_path / "keys.json", 0.0
    first = create_key(file, "acme")
    keyring = KeysFile(file, lambda: now)
    second = create_key(file, "globex")
    assert keyring.tenant(second) is None, "it looks no more than once a second"
    now = LOOK_EVERY_S
    assert (keyring.tenant(first), keyring.tenant(second)) == ("acme", "globex")
    revoke_key(file, read_keys(file)[0].id)
    now = 2 * LOOK_EVERY_S
    assert (keyring.tenant(first), keyring.tenant(second)) == (None, "globex")
    whole = file.read_text()
    file.write_text("half")
    now = 3 * LOOK_EVERY_S
    assert keyring.tenant(second) == "globex"
    file.write_text(whole)
    now = 4 * LOOK_EVERY_S
    assert keyring.tenant(second) == "globex"
    file.unlink()
    now = 5 * LOOK_EVERY_S
    assert keyring.tenant(second) is None
