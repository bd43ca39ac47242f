"""The shipped `look-tiny`: small enough, above its bar, and exactly the one its card tells of."""

from __future__ import annotations

import json

import pytest

from baton.models.catalog import LOOK_TINY
from baton.models.store import DESCRIPTIONS
from training.look_tiny.architecture import (
    CHAT_TEMPLATE,
    IMAGE_TOKEN,
    IMAGE_TOKEN_ID,
    PREPROCESSOR,
    PROCESSOR,
    config_json,
)
from training.look_tiny.pictures import HELD_OUT_SEEDS, TRAINING_START
from training.look_tiny.questions import CHANCE
from training.look_tiny.record import SHIPPED, digest, pictures_digest

BAR, BARRED = 0.9, ("colour", "shape", "water")
LARGEST_BYTES = 8_000_000


@pytest.fixture
def card():
    return json.loads((SHIPPED / "training.json").read_text())


def test_the_card_is_of_the_shipped_weights(card):
    """The catalogue, the card and its examination name the weights that lie here."""
    weights = SHIPPED / "model.safetensors"
    assert digest(weights) == card["weights"]["sha256"] == LOOK_TINY.source_sha256
    assert card["weights"]["bytes"] == weights.stat().st_size
    assert card["examination"]["weights_sha256"] == digest(weights)


def test_small_enough():
    """At most 8 MB beside the text model."""
    assert (SHIPPED / "model.safetensors").stat().st_size <= LARGEST_BYTES


def test_the_pictures_are_still_those_it_was_trained_and_examined_on(card):
    """The generator draws, pixel by pixel, what it drew then."""
    now = pictures_digest(HELD_OUT_SEEDS[:20])
    assert card["pictures_sha256"] == now
    assert card["examination"]["pictures_sha256"] == now


def test_no_examined_picture_was_trained_on(card):
    """The examination's pictures are the held-out ones, all of them."""
    assert card["seeds"]["held_out"] == [HELD_OUT_SEEDS.start, HELD_OUT_SEEDS.stop]
    assert card["seeds"]["training_from"] == TRAINING_START
    assert card["examination"]["pictures"] == len(HELD_OUT_SEEDS)


def test_the_record_meets_the_bar(card):
    """Colour, shape and water each at 90 % or better, every kind above its chance."""
    kinds = card["examination"]["kinds"]
    assert set(kinds) == {*CHANCE, "description"}
    for kind in BARRED:
        assert kinds[kind]["right"] / kinds[kind]["asked"] >= BAR, kind
    for kind, chance in CHANCE.items():
        assert kinds[kind]["chance"] == pytest.approx(chance)
        assert kinds[kind]["share"] > chance


def test_the_descriptions_are_what_the_code_says():
    """config.json, the processor's files and the chat template are the ones the design writes."""
    written = {
        "config.json": config_json(),
        "preprocessor_config.json": PREPROCESSOR,
        "processor_config.json": PROCESSOR,
    }
    for name, content in written.items():
        assert json.loads((SHIPPED / name).read_text()) == json.loads(json.dumps(content))
    assert (SHIPPED / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert set(DESCRIPTIONS) <= {file.name for file in SHIPPED.iterdir()}
    assert config_json()["image_token_index"] == IMAGE_TOKEN_ID
    assert IMAGE_TOKEN in CHAT_TEMPLATE
