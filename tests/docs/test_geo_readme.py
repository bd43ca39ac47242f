"""plugins/baton_geo/README.md is true: every field, setting and error is in it, defaults and all.

Its server command, clients and offline code are run by tests/plain and tests/geo/plain.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter
from pydantic_core import PydanticUndefined
from support.geo_readme import README, blocks, rows, server_command

from baton_geo.card import Band, Card, ClassLabel
from baton_geo.contract import (
    BY_TYPE,
    READERS,
    ClassArea,
    Fetched,
    GeoAnswer,
    GeoFile,
    GeoOptions,
    GeoRequest,
    options_of_query,
)
from baton_geo.errors import GeoError
from baton_geo.prithvi import PrithviConfig, card_of
from baton_geo.prithvi.terratorch import BACKBONES
from baton_geo.raster.messages import NoteCode
from baton_geo.raster.pixels.bands import KNOWN_BANDS
from baton_geo.settings import GeoLimits, GeoSettings, geo_settings

FOLDER = README.parent
TEXT = README.read_text()
TABLES: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("## A request", GeoRequest, ""),
    ("| `baton_geo` | default | what it is |", Card, ""),
    ("| of a band | default | what it is |", Band, ""),
    ("| of a class | default | what it is |", ClassLabel, ""),
    ("## Settings", GeoSettings, ""),
    ("## Settings", GeoLimits, "limits."),
)
HEADS = {"field", "setting", "---"}
FIELDS = [
    (heading, kind, prefix, name)
    for heading, kind, prefix in TABLES
    for name in kind.model_fields
    if (kind, name) != (GeoSettings, "limits")
]


def is_shown(cell: str, annotation: Any, default: Any) -> bool:
    """Whether a cell says this default: nothing for what is required, `none`, or the value itself."""
    if not cell or default is PydanticUndefined:
        return not cell and default is PydanticUndefined
    if cell == "none":
        return default is None
    try:
        value = json.loads(cell.strip("`"))
    except ValueError:
        value = cell.strip("`")
    return bool(TypeAdapter(annotation).validate_python(value) == default)


@pytest.mark.parametrize(
    ("heading", "kind", "prefix", "name"),
    FIELDS,
    ids=[f"{kind.__name__}.{name}" for _, kind, _, name in FIELDS],
)
def test_every_field_is_documented_with_its_default(
    heading: str, kind: type[BaseModel], prefix: str, name: str
) -> None:
    """Of requests, cards and settings."""
    field = kind.model_fields[name]
    default, said = rows(heading)[prefix + name]
    assert is_shown(default, field.annotation, field.get_default(call_default_factory=True)), default
    assert said


@pytest.mark.parametrize("heading", sorted({heading for heading, _, _ in TABLES}))
def test_no_field_is_documented_that_does_not_exist(heading: str) -> None:
    """A renamed field does not stay in the table."""
    known = {prefix + name for where, _, prefix, name in FIELDS if where == heading}
    assert rows(heading).keys() - known <= {
        heading.split("|")[1].strip(" `") if "|" in heading else "",
        *HEADS,
    }


def test_a_wrong_default_would_be_noticed() -> None:
    """The test of the tests."""
    assert not is_shown("`7`", GeoSettings.model_fields["decoders"].annotation, 8)
    assert not is_shown("none", GeoSettings.model_fields["allowed_hosts"].annotation, ())
    assert not is_shown("`127MiB`", GeoLimits.model_fields["block_bytes"].annotation, 128 * 1024 * 1024)
    assert not is_shown("", str, "")


def test_every_field_of_the_answer_is_documented() -> None:
    """Those of the lists in it stand in their row."""
    shown = {
        name.strip("` "): said[0] for cell, said in rows("## An answer").items() for name in cell.split(",")
    }
    assert shown.keys() - {"field", "---"} == set(GeoAnswer.model_fields)
    for name in ClassArea.model_fields:
        assert f"`{name}`" in shown["classes"]
    for name in GeoFile.model_fields:
        assert f"`{name}`" in shown["files"]
    for name in Fetched.model_fields:
        assert f"`{name}`" in shown["fetched"]


@pytest.mark.parametrize("error", GeoError.__subclasses__(), ids=lambda error: error.__name__)
def test_every_error_is_documented_with_its_status(error: type[GeoError]) -> None:
    """And what raises it."""
    status, when = rows("## Errors")[error.code]
    assert (status, bool(when)) == (str(error.status), True)


def test_no_error_is_documented_that_does_not_exist() -> None:
    """A renamed code does not stay in the table."""
    codes = {error.code for error in GeoError.__subclasses__()}
    assert rows("## Errors").keys() - {"code", "---"} == codes


def test_every_note_is_documented() -> None:
    """Its code and what it says; and none that is never made."""
    shown = rows("## Notes")
    codes = {code.strip("` ") for cell in shown for code in cell.split(",")} - {"code", "---"}
    assert codes == set(get_args(NoteCode))
    assert all(said[0] for said in shown.values())


def test_the_table_of_bands_is_the_codes() -> None:
    """Names, wavelengths, common names and numbers of products."""
    shown = rows(
        "| band | centre, nm | common names | Sentinel-2, HLS S30 | Landsat 8-9, HLS L30 | Landsat 4-7 |"
    )
    for band in KNOWN_BANDS:
        common = ", ".join(f"`{name}`" for name in band.common)
        assert shown[band.name] == [f"{band.nm:g}", common, *(name.upper() for name in band.numbers)]
    assert shown.keys() - {"band", "---"} == {band.name for band in KNOWN_BANDS}


def test_the_query_options_shown_are_options() -> None:
    """Every option that is written in a way of its own has an example, and all examples are read."""
    section = TEXT[TEXT.index("An upload's query takes") : TEXT.index("## An answer")]
    shown = dict(re.findall(r"`(\w+)=([^`]+)`", section))
    assert shown.keys() == READERS.keys()
    assert shown.keys() <= GeoOptions.model_fields.keys()
    window = {"window": shown.pop("window")}  # one of the two parts may be given
    assert options_of_query(window, ()).window == (0, 0, 1024, 1024)
    assert options_of_query(shown, ()).outputs == ("mask", "preview")
    for kind in BY_TYPE:
        assert f"`{kind}`" in TEXT


def test_the_upload_shown_asks_for_what_it_says() -> None:
    """The query in Baton's address is one the plugin reads."""
    (upload,) = [block for block in blocks("bash") if "--data-binary" in block]
    query = dict(part.split("=") for part in re.findall(r"pooling\?([^']+)'", upload)[0].split("&"))
    assert query.pop("model") == "flood-tiny"
    assert options_of_query(query, ("application/zip",)).outputs == ("mask", "probabilities", "preview")


def test_the_card_shown_is_one() -> None:
    """The whole config.json is read as a model of this family and its card."""
    config = json.loads(blocks("json")[0])
    card, model = card_of(config), PrithviConfig.from_hf(config)
    assert card.bands[0].aliases == ("B02", "B2")
    assert model.decoder is not None
    assert (model.in_chans, model.num_frames) == (len(card.bands), card.frames)
    assert model.decoder.num_classes == len(card.classes)
    assert config["io_processor_plugin"] == "baton_geo"


def test_what_the_readme_says_is_refused_is_refused_by_name() -> None:
    """TerraMind, another decoder and adapters."""
    for key, value in (("backbone", "terramind_v1_base"), ("decoder", "smp_FPN"), ("peft_config", {"r": 4})):
        config = json.loads(blocks("json")[0])
        config["pretrained_cfg"]["model_args"][key] = value
        with pytest.raises(ValueError, match=rf"model_args\.{key}: "):
            PrithviConfig.from_hf(config)


def test_the_backbones_named_are_the_codes() -> None:
    """Each published backbone stands in the table of what is taken."""
    (row,) = [line for line in TEXT.splitlines() if line.startswith("| backbone |")]
    for name in BACKBONES:
        if name.startswith("prithvi_eo"):
            assert f"`{name}`" in row or f"`_{name.rsplit('_', 1)[1]}`" in row or name.endswith("_tl")


def test_the_settings_shown_are_settings() -> None:
    """In Baton's TOML and on plain vLLM's command line."""
    published, toml = blocks("toml")
    (engine,) = tomllib.loads(published)["engines"]
    assert geo_settings(engine["args"]["additional_config"]).allowed_hosts == ("huggingface.co", "*.hf.co")
    (engine,) = tomllib.loads(toml)["engines"]
    assert geo_settings(engine["args"]["additional_config"]).limits.pixels == 36_000_000
    command = server_command()
    config = json.loads(command[command.index("--additional-config") + 1])
    assert geo_settings(config).limits.tiles_at_once == 256


def test_every_file_named_is_there() -> None:
    """The table of files names them all, and none that is gone."""
    last = TEXT[TEXT.rindex("| file | what it is |") :]
    named = {name.rstrip("/") for name in re.findall(r"`([\w./]+)`", last) if "." in name or "/" in name}
    assert all((FOLDER / name).exists() for name in named)
    modules = {path.name for path in FOLDER.glob("*.py")} - {"__init__.py"}
    assert modules <= named


def test_the_plugins_folder_lists_the_plugin() -> None:
    """plugins/README.md leads here."""
    text = (FOLDER.parent / "README.md").read_text()
    assert "(baton_geo/README.md)" in text
    for name in re.findall(r"`(tests/[\w./]+)`", text):
        assert (FOLDER.parents[1] / name).is_file()
