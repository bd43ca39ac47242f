"""What may change of a handoff, and what never does."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.leases import told, writing

from baton.library.handoff import Context, Handoff, HandoffObject, Lease
from baton.library.here.records import RecordFolder

NOT_SHOWN = {"ttl_s", "revision"}
"""Clients see when it ends; and not how often it was written."""


def record() -> Handoff:
    new = Handoff(tenant="t", model="a", weights="w", created_at=1.0, ttl_s=60, expires_at=9e9, pin=True)
    new.fill([1, 2, 3], Context(), [])
    return new


def test_a_folder_keeps_every_field_of_a_lease(tmp_path: Path) -> None:
    one, two, new, values = RecordFolder(tmp_path), RecordFolder(tmp_path), record(), told()
    assert one.create(new, lambda _record, _others: None)
    changed = one.update(new.id, writing(values | {"archived": True}))
    for found in (changed, two.read(new.id), two.read_all()[0]):
        assert found is not None
        assert {name: getattr(found, name) for name in values} == values
        assert (found.archived, found.revision) == (True, 2)


def test_a_lease_takes_over_every_field_but_those_that_are_its_own() -> None:
    there, values = record(), told()
    writing(values)(there, list)
    there.archived, there.revision = True, 7
    mine, other = record(), record()
    mine.take(there)
    assert {name: getattr(mine, name) for name in Lease.model_fields} == values | {
        "archived": True,
        "revision": 7,
    }
    other.take(there, but={"label", "revision"})
    assert (other.label, other.revision, other.audit) == (None, 0, there.audit)


def test_clients_see_every_field_of_a_lease_that_is_not_hidden_with_reason() -> None:
    assert Lease.model_fields.keys() - HandoffObject.model_fields.keys() == NOT_SHOWN
    shown, values = record(), told()
    writing(values)(shown, list)
    seen = shown.public()
    assert {name: seen[name] for name in ("label", "pin", "state", "error", "bytes", "archived")} == {
        "label": "another", "pin": False, "state": "ready", "error": "it says why", "bytes": 12345, "archived": False,
    }  # fmt: skip
    assert seen["audit"] == values["audit"].model_dump(mode="json")


@pytest.mark.parametrize("name", sorted(Handoff.model_fields.keys() - Lease.model_fields.keys()))
def test_what_is_no_lease_never_changes(name: str) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(record(), name, None)


def test_a_record_of_an_older_version_is_read_and_one_of_a_newer() -> None:
    """Fields stood in another order, and a later version may have more of them."""
    older = (
        '{"id":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","tenant":"t","model":"a","weights":"w","tokens":[1,2],"images":[],'
        '"conversation":null,"latent_steps":0,"placeholder":null,"state":"ready","bytes":5,"created_at":1.0,"ttl_s":60.0,'
        '"expires_at":61.0,"pin":true,"parent":null,"parents":[],"label":"l","automatic":false,"positions":[],'
        '"audit":null,"exact":true,"translated_from":null,"error":null,"archived":true,"revision":3,"later":1}'
    )
    found = Handoff.model_validate_json(older)
    assert (found.tokens, found.label, found.pin, found.bytes, found.revision) == (
        array("i", [1, 2]),
        "l",
        True,
        5,
        3,
    )
