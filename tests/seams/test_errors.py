"""Errors of vLLM, of templates and of Python: which of ours each becomes, and what of its words is left."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("vllm")

import vllm.exceptions  # after the skip
import vllm.v1.engine.exceptions  # after the skip

from baton import errors  # after the skip
from baton.engines import scrub as wording  # after the skip
from baton.engines.vllm import errors as faults  # after the skip
from baton.http.validation.field_limits import RENDERER_ARGUMENTS  # after the skip

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
