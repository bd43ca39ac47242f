"""Errors of vLLM, of templates and of Python: which of ours each becomes, and what of its words is left."""

from __future__ import annotations

import copy
import inspect

import pytest
from pydantic import TypeAdapter, ValidationError

pytest.importorskip("vllm")

import vllm.exceptions  # after the skip
import vllm.v1.engine.exceptions  # after the skip
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # after the skip

from baton import errors  # after the skip
from baton.engines import scrub as wording  # after the skip
from baton.engines.backend import Operation  # after the skip
from baton.engines.vllm import errors as faults  # after the skip
from baton.engines.vllm.handlers import HANDLERS  # after the skip
from baton.http.body.fields import RENDERER_ARGUMENTS  # after the skip

FOREIGN = [
    cls
    for module in (vllm.exceptions, vllm.v1.engine.exceptions)
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == module.__name__
]


def make(cls: type[Exception]) -> Exception:
    """An instance, whatever its constructor wants."""
    error = cls.__new__(cls)
    error.args = ("a message",)
    for name in ("message", "lora_name"):
        setattr(error, name, "a message")
    error.parameter = error.value = None  # type: ignore[attr-defined]  # what VLLMValidationError has
    return error


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda cls: cls.__name__)
def test_every_exception_of_vllm_has_a_row_of_its_own_kind(foreign: type[Exception]) -> None:
    translated = faults.translate(make(foreign))
    row = next(ours for theirs, ours in faults.TABLE if issubclass(foreign, theirs))
    assert type(translated) is row
    client_side = issubclass(foreign, vllm.exceptions.VLLMClientError)
    assert (translated.status < 500) is client_side


def test_a_message_loses_paths_addresses_and_class_names() -> None:
    message = "ValueError: bad <Thing at 0x7f12ab34cd56> in /root/.cache/x/y.json: vllm.SomeError: no"
    text = wording.scrub(message)
    for leak in ("/root", "0x7f", "ValueError", "SomeError"):
        assert leak not in text


@pytest.mark.parametrize(
    "code",
    [
        "object()['a']",
        "None.x",
        "[][0]",
        "1 + 'a'",
        "1 < 'a'",
        "{}[[]]",
        "print(x=1)",
        "1 in 2",
        "(lambda a: a)(1, **{'a': 2})",
    ],
)
def test_what_python_says_of_our_insides_stays_inside(code: str) -> None:
    with pytest.raises((TypeError, AttributeError, IndexError)) as caught:
        eval(code)  # the interpreter's own words
    assert wording.scrub(str(caught.value)) == wording.WRONG_KIND


@pytest.mark.fault("F7")
def test_no_argument_of_a_renderer_passes_for_a_template_s_variable() -> None:
    """Given twice it is a Python error; `padding` and `max_length` would make a prompt of any length."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template
    from vllm.renderers import hf, mistral
    from vllm.tokenizers.protocol import TokenizerLike

    renderers = (
        PreTrainedTokenizerBase.apply_chat_template,
        TokenizerLike.apply_chat_template,
        hf.safe_apply_chat_template,
        mistral.safe_apply_chat_template,
        render_jinja_template,
    )
    named = {
        name
        for renderer in renderers
        for name, parameter in inspect.signature(renderer).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    assert named - {"documents"} == RENDERER_ARGUMENTS, "`documents` is a template's variable too"


def test_a_template_error_is_the_client_s() -> None:
    jinja2 = pytest.importorskip("jinja2")
    assert isinstance(faults.translate(jinja2.TemplateError("roles must alternate")), errors.InvalidRequest)


USER = {"role": "user", "content": "x"}
MESSAGES = {"model": "m", "max_tokens": 5}


def in_content(part: object) -> dict[str, object]:
    return {"role": "user", "content": [part]}


WRONG: list[tuple[Operation, dict[str, object], str, str]] = [
    (Operation.RESPONSES, {"input": [1]}, "input.0", "Input should be an object"),
    (Operation.RESPONSES, {"input": 5}, "input", "Input should be a valid string or a valid list"),
    (Operation.RESPONSES, {"input": [{"role": "user"}]}, "input.0.content", "Field required"),
    (
        Operation.RESPONSES,
        {"input": [USER, in_content({"type": "input_text", "txt": "a"})]},
        "input.1.content.0.text",
        "Field required",
    ),
    (
        Operation.RESPONSES,
        {"input": [in_content({"type": "text", "text": "a"})]},
        "input.0.content.0.type",
        "Input should be 'input_text', 'input_image' or 'input_file'",
    ),
    (
        Operation.RESPONSES,
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]},
        "input.0.arguments",
        "Input should be a valid string",
    ),
    (Operation.RESPONSES, {"input": "x", "tools": [{"type": "function"}]}, "tools.0.name", "Field required"),
    (
        Operation.RESPONSES,
        {"input": "x", "temperature": "hot"},
        "temperature",
        "Input should be a valid number",
    ),
    (Operation.CHAT, {"messages": [USER, {"content": "x"}]}, "messages.1.role", "Field required"),
    (
        Operation.CHAT,
        {"messages": [USER, {"role": "user", "content": 5}]},
        "messages.1.content",
        "Input should be a valid string or a valid list",
    ),
    (
        Operation.CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}],
                },
                {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]},
            ]
        },
        "messages.0.tool_calls.0.function.arguments",
        "Field required",
    ),
    (
        Operation.CHAT,
        {"messages": [USER], "stop": ["a", 5]},
        "stop.1",
        "Input should be a valid string",
    ),
    (
        Operation.CHAT,
        {"messages": [USER], "response_format": {"type": "xml"}},
        "response_format.type",
        "Input should be 'text', 'json_object', 'json_schema' or 'structural_tag'",
    ),
    (
        Operation.MESSAGES,
        MESSAGES | {"messages": [in_content({"type": "text", "text": 5})]},
        "messages.0.content.0.text",
        "Input should be a valid string",
    ),
    (Operation.COMPLETIONS, {"prompt": [[1, "a"]]}, "prompt.0.1", "Input should be a valid integer"),
    (
        Operation.TOKENIZE,
        {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content",
        "Input should be a valid string or a valid list",
    ),
    (
        Operation.EMBEDDINGS,
        {"input": ["a", 5]},
        "input.1",
        "Input should be a valid list, a valid string or an object",
    ),
    (
        Operation.RERANK,
        {"query": "a", "documents": [{"content": [{"type": "text"}]}]},
        "documents.0.content.0.text",
        "Field required",
    ),
    (
        Operation.CHAT,
        {"messages": [USER], "temperature": "hot", "top_p": "cold", "n": {}},
        "n",
        "Input should be a valid integer (and 2 more)",
    ),
]


@pytest.mark.fault("E16")
@pytest.mark.parametrize(("operation", "body", "param", "message"), WRONG, ids=str)
def test_of_all_branches_of_a_body_the_one_is_told_that_the_client_meant(
    operation: Operation, body: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(HANDLERS[operation].request).validate_python(copy.deepcopy(body))
    error = faults.translate(refused.value, body)
    assert (error.param, error.message) == (param, f"{param}: {message}")


@pytest.mark.fault("E16")
@pytest.mark.parametrize(
    ("part", "path", "message"),
    [
        ({"type": "text", "text": 5}, "0.text", "Input should be a valid string"),
        ({"type": "text"}, "0.text", "Field required"),
        (5, "0", "Input should be an object"),
    ],
    ids=str,
)
def test_what_is_validated_later_is_named_from_the_root_of_the_body(
    part: object, path: str, message: str
) -> None:
    """vLLM reads the parts of a message when it renders it; pydantic then knows nothing of the message."""
    good = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    body = {"messages": [USER, good, in_content(part)]}
    request = ChatCompletionRequest.model_validate(body)
    with pytest.raises(ValidationError) as refused:
        [list(message["content"]) for message in request.messages if message["content"] != "x"]
    error = faults.translate(refused.value, body)
    place = f"messages.2.content.{path}"
    assert (error.param, error.message) == (place, f"{place}: {message}")
