from __future__ import annotations

import base64
import json
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from baton.admission import api_keys as keys_module
from baton.admission.api_keys import (
    KEY_PREFIX,
    LOOK_EVERY_S,
    Keyring,
    KeysFile,
    create_key,
    keyring_for,
    read_keys,
    revoke_key,
    rotate_key,
    time_of,
)
from baton.config.settings import load_settings
from baton.errors import SettingsError
from baton.http.middleware.gate import presented_key

KEY_BITS = 256
SAMPLES = 64


def tenant_of(keyring: Keyring, key: str) -> str | None:
    found = keyring.find(key)
    return found.tenant if found is not None else None


def test_a_created_key_opens_and_is_nowhere_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "keys.json"
    key = create_key(file, "acme")
    assert tenant_of(Keyring(read_keys(file)), key) == "acme"
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_revoked_key_no_longer_opens_and_others_do(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    first, second = create_key(file, "acme"), create_key(file, "globex")
    revoke_key(file, read_keys(file)[0].id)
    keyring = Keyring(read_keys(file))
    assert (tenant_of(keyring, first), tenant_of(keyring, second)) == (None, "globex")


def test_a_key_is_an_operators_only_if_it_was_made_one(tmp_path: Path) -> None:
    """The file says nothing of other keys, so that earlier versions read it."""
    file = tmp_path / "keys.json"
    plain, operators = create_key(file, "acme"), create_key(file, "acme", operator=True)
    keyring = KeysFile(file)
    assert [found and found.operator for found in map(keyring.find, (plain, operators))] == [False, True]
    assert ["operator" in row for row in json.loads(file.read_text())] == [False, True]


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


def random_part(key: str) -> int:
    part = key.removeprefix(KEY_PREFIX)
    return int.from_bytes(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def test_every_one_of_a_keys_256_bits_is_random(tmp_path: Path) -> None:
    """In so many keys a bit that is always the same is a constant: by chance once in 2 to the 63."""
    keys = [create_key(tmp_path / "keys.json", "acme") for _ in range(SAMPLES)]
    ones, zeros = 0, 0
    for value in map(random_part, keys):
        ones, zeros = ones | value, zeros | ~value
    varying = (ones & zeros & (2**KEY_BITS - 1)).bit_count()
    print(f"G1: bits that vary in {SAMPLES} keys: {varying}")
    assert varying == KEY_BITS
    assert len({len(key) for key in keys}) == 1


WRONG: dict[str, Callable[[str, str], str]] = {
    "unknown": lambda valid, revoked: KEY_PREFIX + "A" * 43,
    "revoked": lambda valid, revoked: revoked,
    "none": lambda valid, revoked: "",
    "no prefix": lambda valid, revoked: valid.removeprefix(KEY_PREFIX),
    "half": lambda valid, revoked: valid[:20],
    "one character more": lambda valid, revoked: valid + "x",
    "the last character another": lambda valid, revoked: valid[:-1] + ("x" if valid[-1] != "x" else "y"),
    "in capitals": lambda valid, revoked: valid.upper(),
    "longer than any": lambda valid, revoked: "x" * 10_000,
    "not ASCII": lambda valid, revoked: "\xff\x00\n",
    "a digest": lambda valid, revoked: keys_module.digest(valid),
}


def lines_run(work: Callable[[], object]) -> list[tuple[str, int]]:
    """The lines of keys.py that `work` runs, in order."""
    ran: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != keys_module.__file__:
            return None
        if event == "line":
            ran.append((frame.f_code.co_name, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return ran


@pytest.mark.fault("G2")
def test_every_wrong_key_takes_the_path_of_a_right_one(tmp_path: Path) -> None:
    """Line by line the same: nothing is compared but digests, and no kind of wrong key is told apart."""
    file = tmp_path / "keys.json"
    valid, revoked = create_key(file, "acme"), create_key(file, "acme")
    revoke_key(file, read_keys(file)[1].id)
    keyring = KeysFile(file, lambda: 0.0)
    path = lines_run(lambda: keyring.find(valid))
    assert "digest" in {function for function, _ in path}
    wrong = {name: make(valid, revoked) for name, make in WRONG.items()}
    others = [name for name, key in wrong.items() if lines_run(partial(keyring.find, key)) != path]
    print(f"G2: {len(WRONG)} kinds of wrong keys, {len(path)} lines each, other paths {len(others)}")
    assert others == []
    assert {keyring.find(key) for key in wrong.values()} == {None}


@pytest.mark.parametrize("tenant", ["local", "none", "other"])
def test_a_name_that_stands_for_something_else_is_no_tenants(tmp_path: Path, tenant: str) -> None:
    with pytest.raises(SettingsError, match="reserved"):
        create_key(tmp_path / "keys.json", tenant)
    assert not (tmp_path / "keys.json").exists()


def file_of_local(file: Path) -> None:
    """A keys file of an earlier version, or written by hand: one key of the tenant of gateways without keys."""
    create_key(file, "acme")
    (stored,) = json.loads(file.read_text())
    file.write_text(json.dumps([stored, stored | {"tenant": "local", "id": "0a1b2c3d", "sha256": "0" * 64}]))


def test_a_key_of_the_keyless_tenant_closes_the_gateway_until_it_is_revoked(tmp_path: Path) -> None:
    """It would open the handoffs and the prefix cache of everyone who ever called without a key."""
    file = tmp_path / "keys.json"
    file_of_local(file)
    with pytest.raises(SettingsError, match=r"'0a1b2c3d'.*`baton keys revoke`") as refused:
        keyring_for(load_settings(auth={"keys_file": file}))
    assert len(refused.value.message.splitlines()) == 1
    revoke_key(file, "0a1b2c3d")
    assert keyring_for(load_settings(auth={"keys_file": file})) is not None


def test_a_running_gateway_takes_no_key_of_the_keyless_tenant(tmp_path: Path) -> None:
    file, now = tmp_path / "keys.json", 0.0
    key = create_key(file, "acme")
    keyring = KeysFile(file, lambda: now)
    stored = json.loads(file.read_text())
    mine = {"id": "0a1b2c3d", "tenant": "local", "sha256": keys_module.digest("mine"), "created_at": 0}
    file.write_text(json.dumps([*stored, mine]))
    now = LOOK_EVERY_S
    assert (tenant_of(keyring, "mine"), tenant_of(keyring, key)) == (None, "acme")


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


@pytest.mark.fault("G3")
def test_a_running_gateway_follows_its_keys_file(tmp_path: Path) -> None:
    """Keys made and revoked count within a second; a broken file changes nothing, one that is gone closes it."""
    file, now = tmp_path / "keys.json", 0.0
    first = create_key(file, "acme")
    keyring = KeysFile(file, lambda: now)
    second = create_key(file, "globex")
    assert tenant_of(keyring, second) is None, "it looks no more than once a second"
    now = LOOK_EVERY_S
    assert (tenant_of(keyring, first), tenant_of(keyring, second)) == ("acme", "globex")
    revoke_key(file, read_keys(file)[0].id)
    now = 2 * LOOK_EVERY_S
    assert (tenant_of(keyring, first), tenant_of(keyring, second)) == (None, "globex")
    whole = file.read_text()
    file.write_text("half")
    now = 3 * LOOK_EVERY_S
    assert tenant_of(keyring, second) == "globex"
    file.write_text(whole)
    now = 4 * LOOK_EVERY_S
    assert tenant_of(keyring, second) == "globex"
    file.unlink()
    now = 5 * LOOK_EVERY_S
    assert tenant_of(keyring, second) is None


@pytest.mark.fault("G10")
@pytest.mark.parametrize(
    ("mode", "taken"), [(0o666, False), (0o602, False), (0o644, True), (0o440, True), (0o660, True)]
)
def test_a_file_that_every_user_may_write_is_refused(tmp_path: Path, mode: int, taken: bool) -> None:
    """Whoever may write it can make keys of any tenant. Groups are those of mounts."""
    file = tmp_path / "keys.json"
    key = create_key(file, "acme")
    file.chmod(mode)
    if taken:
        assert tenant_of(Keyring(read_keys(file)), key) == "acme"
    else:
        with pytest.raises(SettingsError, match="chmod o-w"):
            read_keys(file)


def test_a_key_says_what_it_may_and_a_file_of_before_says_all(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    create_key(file, "acme")
    create_key(file, "acme", models=("small-*", "b"), day_tokens=5, month_tokens=9, share=3, expires_at=2**33)
    rows = json.loads(file.read_text())
    assert set(rows[0]) == {"id", "tenant", "sha256", "created_at"}, "what an earlier version reads"
    plain, bound = read_keys(file)
    assert (plain.may_use("x"), bound.may_use("x"), bound.may_use("x", "b"), bound.may_use("small-1")) == (
        *(True, False, True, True),
    )
    assert (plain.day_tokens, plain.expires_at, plain.share, Keyring([plain, bound]).share("acme")) == (
        None,
        None,
        1,
        3,
    )
    assert Keyring([plain]).share("nobody") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"models": ("a b",)},
        {"day_tokens": 0},
        {"month_tokens": -1},
        {"share": 0},
        {"share": 101},
        {"expires_at": -1},
    ],
)
def test_an_option_that_cannot_be_makes_no_key_and_names_the_field(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    file = tmp_path / "keys.json"
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        create_key(file, "acme", **wrong)
    assert not file.exists()


@pytest.mark.fault("G22")
def test_a_key_ends_at_its_second_and_is_told_apart_from_an_unknown_one(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    now = [1000.0]
    key = create_key(file, "acme", expires_at=1060)
    keyring = KeysFile(file, wall=lambda: now[0])
    assert tenant_of(keyring, key) == "acme"
    now[0] = 1059.9
    assert tenant_of(keyring, key) == "acme"
    now[0] = 1060.0
    assert (tenant_of(keyring, key), keyring.expired(key), keyring.expired("other")) == (None, True, False)


def test_a_rotated_key_keeps_its_id_and_all_that_it_may(tmp_path: Path) -> None:
    """Its former secret opens for as long as it was kept, but not beyond the key's own end."""
    file = tmp_path / "keys.json"
    now = [1000.0]
    former, other = (
        create_key(file, "acme", month_tokens=7, models=("a",), expires_at=5000),
        create_key(file, "b"),
    )
    was = read_keys(file)[0]
    new, stored = rotate_key(file, was.id, keep_s=60, wall=lambda: now[0])
    keyring = KeysFile(file, wall=lambda: now[0])
    found = keyring.find(new)
    assert found == stored
    assert found is not None
    assert found.model_dump(exclude={"sha256", "created_at"}) == was.model_dump(
        exclude={"sha256", "created_at"}
    )
    assert (tenant_of(keyring, former), tenant_of(keyring, other)) == ("acme", "b")
    assert keyring.named(was.id) == stored
    now[0] = 1060
    assert keyring.named(was.id) == stored, "work under its id ends with the former secret"
    assert (tenant_of(keyring, former), tenant_of(keyring, new)) == (None, "acme")
    _, later = rotate_key(file, was.id, keep_s=10**6, wall=lambda: now[0])
    assert {key.expires_at for key in read_keys(file) if key.id == was.id} == {5000}
    rotate_key(file, was.id, wall=lambda: now[0])
    assert [key.id for key in read_keys(file)].count(was.id) == 1, "without --keep no former secret opens"
    assert later.id == was.id
    revoke_key(file, was.id)
    assert [key.tenant for key in read_keys(file)] == ["b"]
    with pytest.raises(SettingsError, match="no key with the id"):
        rotate_key(file, was.id)


TIMES = {
    "30d": 1000 + 30 * 86400,
    "12h": 1000 + 12 * 3600,
    "5m": 1300,
    "1970-01-02": 86400,
    "1970-01-01T01:00:00+00:00": 3600,
}


def test_times_are_read_as_they_are_written() -> None:
    assert {given: time_of(given, lambda: 1000) for given in TIMES} == TIMES
    for wrong in ("", "d", "tomorrow", "0d", "-1d", "1970-01-01", "9" * 9 + "d", "2030-02-30", "1e3d"):
        with pytest.raises(SettingsError, match="time"):
            time_of(wrong, lambda: 1000)


@pytest.mark.fault("G15")
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_command_that_is_killed_in_the_middle_leaves_the_file_as_it_was(
    tmp_path: Path, moment: str
) -> None:
    """By SIGKILL, in a process of its own; the next command takes away what it left."""
    file = tmp_path / "keys.json"
    key = create_key(file, "acme")
    before = file.read_bytes()
    script = (
        "import os, signal, sys; from pathlib import Path; from baton.admission import api_keys\n"
        f"os.{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "api_keys.create_key(Path(sys.argv[1]), 'globex')"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(file)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert file.read_bytes() == before
    assert tenant_of(Keyring(read_keys(file)), key) == "acme"
    create_key(file, "initech")
    assert {path.name for path in tmp_path.iterdir()} == {"keys.json", ".keys.json.lock"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
