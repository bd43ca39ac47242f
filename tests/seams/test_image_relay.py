"""What handoffs of contexts with images rely on in vLLM, and the arithmetic that lays images over token ids."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.random_images import picture
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.multimodal.utils import get_mm_features_in_window
from vllm.renderers.base import BaseRenderer
from vllm.v1.core.sched.output import SchedulerOutput

from baton.engines.backend import Operation
from baton.engines.transfers import TransferRequest
from baton.engines.vllm.handlers import with_whole_prompt
from baton.engines.vllm.images import ImagePrompts, _target
from baton.errors import HandoffIncompatible, ImagesMisplaced, InvalidRequest
from baton.images.image import PlacedImage
from baton_kv.connector import TransferStats, images_of
from baton_kv.format import ImageRef

IMAGE = 9
BIRD, FISH = picture(1), picture(2)


class Items(list[Any]):
    """What vLLM asks of a request's items when it names them."""

    def get_all_items_for_hash(self) -> list[Any]:
        return self


def names(uuid: str | None, model: str = "m", **options: Any) -> list[str]:
    given: Any = {"image": Items([b"pixels"])}
    inputs = ProcessorInputs([1], given, {"image": [uuid]}, **options)
    return inputs.get_mm_hashes(model, "sha256")["image"]


def test_an_image_s_uuid_is_its_name_whatever_the_model_s_path() -> None:
    assert names(BIRD.digest, "/a") == names(BIRD.digest, "/b") == [BIRD.digest]
    assert names(None, "/a") != names(None, "/b")


def test_an_image_with_settings_of_its_own_has_another_name() -> None:
    """So it is told apart from the one we know, and refused."""
    assert names(BIRD.digest, hf_processor_mm_kwargs={"crop": 1}) != [BIRD.digest]
    assert names(BIRD.digest, media_io_kwargs={"image": {"mode": "L"}}) != [BIRD.digest]


def feature(name: str, offset: int, length: int, modality: str = "image") -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, modality, name, PlaceholderRange(offset, length))


def request(*features: MultiModalFeatureSpec, embeds: Any = None, lora: Any = None) -> Any:
    return SimpleNamespace(mm_features=list(features), prompt_embeds=embeds, lora_request=lora)


def test_a_request_s_images_are_read_as_the_scheduler_knows_them() -> None:
    found = images_of(request(feature("b", 40, 9), feature("a", 3, 9)))
    assert found == (ImageRef("a", 3, 9), ImageRef("b", 40, 9))
    assert images_of(request()) == ()


@pytest.mark.parametrize(
    "other",
    [
        request(feature("a", 3, 9), feature("b", 40, 9, "audio")),
        request(feature("a", 3, 9, "video")),
        request(feature("", 3, 9)),
        request(feature("x" * 257, 3, 9)),
        request(feature("a", 3, 9), embeds=object()),
        request(feature("a", 3, 9), lora=LoRARequest("l", 1, "/nowhere")),
    ],
)
def test_what_is_more_than_text_and_images_is_not_compared_but_computed(other: Any) -> None:
    assert images_of(other) is None


def test_the_encoder_is_not_asked_for_what_is_computed() -> None:
    """As the scheduler finds the images of a step: those that it ends before, or that end before it, are not."""
    features = [feature("a", 10, 10), feature("b", 30, 10)]
    assert get_mm_features_in_window(features, start=20, end=30) == (1, 1)
    assert get_mm_features_in_window(features, start=19, end=31) == (0, 2)
    assert get_mm_features_in_window(features, start=40, end=50) == (2, 2)


def test_the_seams_are_where_they_were() -> None:
    assert "skip_mm_cache" in inspect.signature(BaseRenderer.render_cmpl_async).parameters
    assert "scheduled_encoder_inputs" in SchedulerOutput.__dataclass_fields__


def test_images_that_were_encoded_are_counted_together() -> None:
    one, two = TransferStats({"outcomes": [], "encoded": 2}), TransferStats({"outcomes": [], "encoded": 3})
    assert one.aggregate(two).data["encoded"] == 5
    assert not one.is_empty()
    assert one.aggregate(TransferStats()).data["encoded"] == 2
    assert TransferStats().aggregate(TransferStats()).is_empty()


def span(offset: int, length: int) -> PlaceholderRange:
    return PlaceholderRange(offset, length)


@pytest.mark.parametrize(
    ("prompt", "tokens", "ranges", "target"),
    [
        ([1, 9, 2], [1, 9, 9, 9, 2], [span(1, 3)], (9,)),
        ([9], [9, 9], [span(0, 2)], (9,)),
        ([1, 9, 2, 9], [1, 9, 9, 2, 9, 9], [span(1, 2), span(4, 2)], (9,)),
        ([1, 7, 8, 2], [1, 5, 9, 9, 6, 2], [span(1, 4)], (7, 8)),
        ([1, 2], [9, 9, 1, 2], [span(0, 2)], ()),
        ([1, 9, 9, 2], [1, 9, 9, 9, 9, 2], [span(1, 3)], None),  # one place more than images
        ([1, 9, 2], [1, 9, 9, 3], [span(1, 2)], None),  # the text is another one
        ([1, 7, 2, 8], [1, 9, 9, 2, 9, 9], [span(1, 2), span(4, 2)], None),
        ([1, 7, 8, 2, 7], [1, 9, 2, 9], [span(1, 1), span(3, 1)], None),
    ],
)
def test_what_gave_way_to_an_image_is_found_by_what_did_not(
    prompt: list[int], tokens: list[int], ranges: list[PlaceholderRange], target: tuple[int, ...] | None
) -> None:
    assert _target(prompt, tokens, ranges) == target


class Renderer:
    """A processor that makes so many tokens of every image, in vLLM's words."""

    mm_processor_cache = None
    first = 0

    def __init__(self, length: int, names: list[str] | None = None, token: int = IMAGE) -> None:
        self._length, self._names, self._token = length, names, token

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(bos_token_id=self.first)

    async def render(self, prompt: list[int], parts: list[Any], *, cached: bool) -> Any:
        tokens: list[int] = []
        spans = []
        for each in prompt:
            if each == IMAGE:
                spans.append(span(len(tokens), self._length))
            tokens += [self._token] * self._length if each == IMAGE else [each]
        names = self._names or [part["uuid"] for part in parts]
        placed = {"mm_placeholders": {"image": spans}, "mm_hashes": {"image": names}, "mm_kwargs": {}}
        return {"type": "multimodal", "prompt_token_ids": tokens} | placed


def prompts(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> ImagePrompts:
    made = ImagePrompts(SimpleNamespace(renderer=renderer), "m")  # type: ignore[arg-type]  # no more of it
    monkeypatch.setattr(made, "_processed", renderer.render)
    return made


async def test_an_image_is_placed_and_laid_over_answers_that_no_processor_saw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = prompts(Renderer(3), monkeypatch)
    tokens, placed = await made.place([1, IMAGE, 2, IMAGE], [BIRD, FISH], begins=True)
    assert tokens == [1, 9, 9, 9, 2, 9, 9, 9]
    assert [(each.image.digest, each.offset) for each in placed] == [(BIRD.digest, 1), (FISH.digest, 5)]
    context = [*tokens, 70, 71, 72]
    prompt = {"type": "token", "prompt_token_ids": context, "arrival_time": 1.5}
    whole = await made.add(prompt, placed)
    assert whole["prompt_token_ids"] == context
    assert whole["mm_placeholders"]["image"] == [span(1, 3), span(5, 3)]
    assert (whole["type"], whole["arrival_time"]) == ("multimodal", 1.5)


@pytest.mark.parametrize(
    "renderer",
    [Renderer(4), Renderer(3, names=["b" * 64]), Renderer(3, token=8)],
    ids=["length", "name", "ids"],
)
async def test_an_engine_that_makes_something_else_of_an_image_is_given_nothing(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = [PlacedImage(BIRD, 1, 3, (IMAGE,))]
    prompt = {"type": "token", "prompt_token_ids": [1, 9, 9, 9, 2]}
    with pytest.raises(HandoffIncompatible):
        await prompts(renderer, monkeypatch).add(prompt, placed)
    right = await prompts(Renderer(3), monkeypatch).add(prompt, placed)
    assert right["prompt_token_ids"] == [1, 9, 9, 9, 2]


def inserting(
    monkeypatch: pytest.MonkeyPatch, before: list[int], *, cut: int = 0, after: list[int] | None = None
) -> ImagePrompts:
    """A model that writes `before` and two tokens of an image, and then the prompt without its first `cut`."""
    made = prompts(Renderer(3), monkeypatch)

    async def inserted(prompt: list[int], parts: list[Any], *, cached: bool) -> Any:
        tokens = [*before, 9, 9, *prompt[cut:], *(after or [])]
        spans = {"image": [span(len(before), 2)]}
        named = {"mm_placeholders": spans, "mm_hashes": {"image": [BIRD.digest]}}
        return {"type": "multimodal", "prompt_token_ids": tokens, "mm_kwargs": {}} | named

    monkeypatch.setattr(made, "_processed", inserted)
    return made


async def test_a_model_that_is_not_told_where_takes_images_first_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = inserting(monkeypatch, [])
    tokens, placed = await made.place([1, 2], [BIRD], begins=True)
    assert (tokens, placed[0].target) == ([9, 9, 1, 2], ())
    prompt = {"type": "token", "prompt_token_ids": [9, 9, 1, 2, 3]}
    whole = await made.add(prompt, placed)
    assert whole["mm_placeholders"]["image"] == [span(0, 2)]
    with pytest.raises(InvalidRequest, match="beginning"):
        await made.place([1, 2], [BIRD], begins=False)


@pytest.mark.parametrize(
    ("prompt", "shape", "tokens"),
    [
        ([0, 1, 2], {"before": [], "cut": 1, "after": [7]}, [9, 9, 1, 2, 7]),  # Fuyu, a text
        ([1, 2], {"before": [], "after": [7]}, [9, 9, 1, 2, 7]),  # Fuyu, a chat
        ([0, 1, 7], {"before": [], "cut": 1}, [9, 9, 1, 7]),  # Fuyu, with the answer's beginning
        ([0, 1, 2], {"before": [], "after": [8]}, [9, 9, 0, 1, 2, 8]),  # PaliGemma
        ([0], {"before": [], "cut": 1, "after": [7]}, [9, 9, 7]),
    ],
)
async def test_what_such_a_model_writes_around_the_prompt_is_the_context_s(
    prompt: list[int], shape: dict[str, Any], tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = inserting(monkeypatch, **shape)
    found, placed = await made.place(prompt, [BIRD], begins=True)
    assert found == tokens
    assert [(each.offset, each.length, each.target) for each in placed] == [(0, 2, ())]


@pytest.mark.parametrize(
    ("prompt", "shape"),
    [
        ([1, 2], {"before": [], "after": [7, 7]}),  # more than a beginning of the answer
        ([1, 2], {"before": [], "cut": 2, "after": [5, 6]}),  # another text
        ([1, 2], {"before": [5]}),  # not at the beginning, and nothing gave way
        ([1, 2], {"before": [0, 5], "after": [7]}),
    ],
)
async def test_a_prompt_that_is_written_anew_is_refused(
    prompt: list[int], shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImagesMisplaced):
        await inserting(monkeypatch, **shape).place(prompt, [BIRD], begins=True)


def test_beside_token_ids_messages_hold_no_parts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "x"}
    text = {"type": "text", "text": "so?"}
    messages = [{"role": "user", "content": [image]}, {"role": "user", "content": [text, image]}]
    messages += [{"role": "user", "content": "so?"}]
    body = with_whole_prompt(Operation.CHAT, {"messages": messages}, TransferRequest(prompt=[1]))
    assert [message["content"] for message in body["messages"]] == ["", "", "so?"], "none is rendered"
    assert body["kv_transfer_params"] == {"prompt_token_ids": [1]}
    assert messages[0]["content"] == [image], "the request's own body is as it was"
