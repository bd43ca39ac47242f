"""Read thoughts and calls of tools out of an answer in one way, whether it is sent whole, streamed, or cut.

vLLM reads an answer in one piece by other code than a streamed one. Of a call that was cut the one makes raw
text, or a call with arguments that nobody wrote, and says `tool_calls`; the other closes what was open. Here
an answer in one piece is its stream put together, and a call that was cut has what was written of it, or,
where a family's calls are read when they are complete, is left out.

A call that a request demands is held by a grammar, or the request is refused.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from openai.types.responses import FunctionTool
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.engine.adapters import ParserEngineToolAdapter
from vllm.parser.engine.events import EventType, SemanticEvent
from vllm.parser.engine.incremental_lexer import CONTENT_TERMINAL
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.parser.harmony import HarmonyParser, Segment
from vllm.reasoning.granite_reasoning_parser import GraniteReasoningParser
from vllm.reasoning.olmo3_reasoning_parser import Olmo3ReasoningParser
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.abstract_tool_parser import ToolParser
from vllm.tool_parsers.apertus_tool_parser import ApertusToolParser
from vllm.tool_parsers.deepseekv3_tool_parser import DeepSeekV3ToolParser
from vllm.tool_parsers.deepseekv31_tool_parser import DeepSeekV31ToolParser
from vllm.tool_parsers.ernie45_tool_parser import Ernie45ToolParser
from vllm.tool_parsers.functiongemma_tool_parser import FunctionGemmaToolParser
from vllm.tool_parsers.gemma4_engine_tool_parser import Gemma4EngineToolParser
from vllm.tool_parsers.granite4_tool_parser import Granite4ToolParser
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.hunyuan_a13b_tool_parser import HunyuanA13BToolParser
from vllm.tool_parsers.internlm2_tool_parser import Internlm2ToolParser
from vllm.tool_parsers.jamba_tool_parser import JambaToolParser
from vllm.tool_parsers.lfm2_tool_parser import Lfm2ToolParser
from vllm.tool_parsers.llama4_pythonic_tool_parser import Llama4PythonicToolParser
from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser
from vllm.tool_parsers.longcat_tool_parser import LongcatFlashToolParser
from vllm.tool_parsers.olmo3_tool_parser import Olmo3PythonicToolParser
from vllm.tool_parsers.phi4mini_tool_parser import Phi4MiniJsonToolParser
from vllm.tool_parsers.pythonic_tool_parser import PythonicToolParser
from vllm.tool_parsers.step3_tool_parser import Step3ToolParser
from vllm.tool_parsers.structural_tag_registry import register_vllm_structural_tag
from xgrammar import StructuralTag
from xgrammar.structural_tag import GrammarFormat, TagFormat, TagsWithSeparatorFormat, TriggeredTagsFormat

from baton.engines.vllm.calls import (
    APERTUS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    ERNIE,
    FUNCTION_GEMMA,
    GRANITE_THOUGHTS,
    INTERNLM,
    LFM,
    LLAMA,
    LLAMA4,
    LONGCAT,
    OLMO,
    OLMO_THOUGHTS,
    PHI,
    PYTHON,
    REQUIRED,
    STEP,
    TAGGED,
    TAGGED_LIST,
    Block,
    BlockReader,
    CallReader,
    Form,
    NamedReader,
    Piece,
    Reader,
    ThoughtReader,
    Thoughts,
)
from baton.engines.vllm.client import CURRENT_CALL
from baton.errors import InvalidRequest
from baton.telemetry.ids import UNHELD_HEADER

FORMS: dict[type[Any], Form | Block] = {
    Hermes2ProToolParser: TAGGED,
    Granite4ToolParser: TAGGED,
    LongcatFlashToolParser: LONGCAT,
    Ernie45ToolParser: ERNIE,
    Llama3JsonToolParser: LLAMA,
    DeepSeekV3ToolParser: DEEPSEEK_V3,
    DeepSeekV31ToolParser: DEEPSEEK_V31,
    Internlm2ToolParser: INTERNLM,
    Phi4MiniJsonToolParser: PHI,
    JambaToolParser: TAGGED_LIST,
    HunyuanA13BToolParser: TAGGED_LIST,
    ApertusToolParser: APERTUS,
    PythonicToolParser: PYTHON,
    Llama4PythonicToolParser: LLAMA4,
    Olmo3PythonicToolParser: OLMO,
    Lfm2ToolParser: LFM,
    Step3ToolParser: STEP,
    FunctionGemmaToolParser: FUNCTION_GEMMA,
}
"""Parsers of vLLM's whose place is taken here, and what each reads."""
THOUGHTS: dict[type[Any], Thoughts] = {
    Olmo3ReasoningParser: OLMO_THOUGHTS,
    GraniteReasoningParser: GRANITE_THOUGHTS,
}
"""Parsers of vLLM's whose marks of thoughts are text, which they find in pieces of one token alone, and after
which they leave calls to be text."""
TAGS: dict[type[Any], str] = {Granite4ToolParser: "hermes", Gemma4EngineToolParser: "gemma4"}
"""Names of the grammars of calls of those parsers for which vLLM has none."""
HANDLERS = (
    *("openai_serving_chat", "anthropic_serving_messages", "openai_serving_responses"),
    "serving_tokenization",
)
"""vLLM's handlers that have parsers, or a renderer that has one."""
CALLED, STOPPED = '"finish_reason":"tool_calls"', '"finish_reason":"stop"'
"""How an event says why an answer ended."""
UNCLOSED = frozenset({ParserState.TOOL_PREAMBLE, ParserState.TOOL_NAME, ParserState.TOOL_ARGS})
"""States of vLLM's engine of parsers in which a call has begun, and is not complete."""


class WrittenCalls:
    """The part of a parser of vLLM's that reads calls; the rest is the parser's whose place it takes.

    Attributes:
        form: how the calls are written.
        cut: whether the answer was cut; set before it ends.
    """

    form: Form | Block = REQUIRED
    tools: list[Any]
    engine_based_streaming = True
    cut = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader = self._new_reader()
        self._calls = 0
        if isinstance(self.form, Block):  # vLLM's read the tools in a chat's shape alone
            self.tools = [
                SimpleNamespace(function=tool) if isinstance(tool, FunctionTool) else tool
                for tool in self.tools
            ]

    def _new_reader(self) -> Reader:
        return CallReader(self.form) if isinstance(self.form, Form) else BlockReader(self.form, self._as_vllm)

    def _as_vllm(self, text: str) -> list[tuple[str, str]]:
        """Read whole calls by the parser whose place is taken."""
        parser: Any = super()
        found = parser.extract_tool_calls(text, None)
        return [(call.function.name, call.function.arguments) for call in found.tool_calls]

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """Read the next piece of an answer."""
        if request.tool_choice == "none" or not request.tools:
            return DeltaMessage(content=delta_text) if delta_text else None
        return self._delta(self._reader.feed(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        """Read the end of an answer."""
        return self._delta(self._reader.finish(cut=self.cut))

    @property
    def inside(self) -> bool:
        """Whether a call has begun that is not complete."""
        return self._reader.open

    def _delta(self, pieces: Sequence[Piece]) -> DeltaMessage | None:
        text = "".join(piece for kind, piece in pieces if kind == "text")
        calls: dict[int, DeltaToolCall] = {}
        for kind, piece in pieces:
            if kind == "name":
                call = DeltaToolCall(
                    index=self._calls,
                    id=make_tool_call_id(),
                    type="function",
                    function=DeltaFunctionCall(name=piece),
                )
                calls[self._calls] = call
                self._calls += 1
            elif kind == "arguments":
                last = self._calls - 1
                function = calls.setdefault(
                    last, DeltaToolCall(index=last, function=DeltaFunctionCall())
                ).function
                function.arguments = (function.arguments or "") + piece
        return DeltaMessage(content=text or None, tool_calls=list(calls.values())) if text or calls else None

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Read an answer in one piece, as vLLM's own parsers can."""
        reader = self._new_reader()
        pieces = [*reader.feed(model_output), *reader.finish(cut=False)]
        calls = list[FunctionCall]()
        for kind, piece in pieces:
            if kind == "name":
                calls.append(FunctionCall(name=piece, arguments=""))
            elif kind == "arguments":
                calls[-1].arguments += piece
        text = "".join(piece for kind, piece in pieces if kind == "text")
        return ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=[ToolCall(function=call) for call in calls],
            content=text or None,
        )


class ForcedCalls(WrittenCalls, ToolParser):
    """The parser of calls in the JSON that vLLM holds a model to which must call a tool.

    Args:
        name: of the tool that it must call; None: any of them.
    """

    supports_required_and_named = False

    def __init__(self, tokenizer: Any, tools: Any, name: str | None) -> None:
        self._name = name
        super().__init__(tokenizer, tools)

    def _new_reader(self) -> Reader:
        return CallReader(REQUIRED) if self._name is None else NamedReader(self._name)


def mend(state: Any) -> None:
    """Mend the parsers of vLLM's handlers, and what chats say of an answer that was cut.

    Args:
        state: what vLLM's factory made.
    """
    made: dict[type[Any], type[Any]] = {}
    for name in HANDLERS:
        serving: Any = getattr(state, name, None)
        renderer = getattr(serving, "online_renderer", None)
        for holder, attribute in ((serving, "parser_cls"), (serving, "parser"), (renderer, "parser")):
            parser = getattr(holder, attribute, None)
            if isinstance(parser, type) and parser not in made.values():
                setattr(holder, attribute, made.setdefault(parser, mended(parser)))
        if hasattr(serving, "chat_completion_full_generator"):
            serving.chat_completion_full_generator = _telling_cuts(serving.chat_completion_full_generator)
            serving.chat_completion_stream_generator = _telling_stops(
                serving.chat_completion_stream_generator
            )


def mended(parser: type[Any]) -> type[Any]:
    """Make a parser that reads whole and streamed answers alike of one of vLLM's, and holds demanded calls.

    One that vLLM has for a single family, with code of its own, keeps it for streams, which become whole
    answers too.
    """
    if parser is HarmonyParser:
        return _Harmony
    if not issubclass(parser, DelegatingParser):
        return parser
    own = parser.parse_delta is not DelegatingParser.parse_delta
    alike = not ALIKE.isdisjoint(base.__name__ for base in parser.__mro__)

    class Mended(parser):
        _tool_parser: Any
        tool_parser_cls = parser.tool_parser_cls if own else _in_place_of(parser.tool_parser_cls)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._prompt: list[int] = []
            self._blanks = _Blanks()
            marks = THOUGHTS.get(type(self._reasoning_parser))
            self._thoughts = ThoughtReader(marks) if marks is not None else None

        def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
            super().set_prompt_token_ids(prompt_token_ids)
            self._prompt = list(prompt_token_ids)

        def adjust_request(self, request: Any) -> Any:
            return _held(request, super().adjust_request, in_json=not own)

        def parse(
            self,
            model_output: str,
            request: Any,
            enable_auto_tools: bool = False,
            model_output_token_ids: Sequence[int] = (),
        ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
            self._take_forced(request)
            read = isinstance(self._tool_parser, WrittenCalls | ParserEngineToolAdapter)
            if not read and not alike:
                return super().parse(  # type: ignore[no-any-return]
                    model_output, request, enable_auto_tools, model_output_token_ids
                )
            ids = list(model_output_token_ids)
            return _whole(self.parse_delta(model_output, ids, request, self._prompt, finished=True))

        def parse_delta(
            self,
            delta_text: str,
            delta_token_ids: list[int],
            request: Any,
            prompt_token_ids: list[int] | None = None,
            *,
            finished: bool,
        ) -> DeltaMessage | None:
            self._take_forced(request)
            thought = ""
            if self._thoughts is not None and not self._has_thought(prompt_token_ids):
                thought, rest = self._thoughts.feed(delta_text, finished=finished, cut=_was_cut())
                if rest is None:
                    return DeltaMessage(reasoning=thought) if thought and request.include_reasoning else None
                self._stream_state.reasoning_ended, delta_text, delta_token_ids = True, rest, []
            unclosed = _Unclosed(self._tool_parser) if finished and _was_cut() else None
            delta: DeltaMessage | None = super().parse_delta(
                delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
            )
            delta = delta if unclosed is None else unclosed.complete(delta)
            if thought and request.include_reasoning:
                delta = delta or DeltaMessage()
                delta.reasoning = thought
            tools = request.tools and isinstance(self._tool_parser, ParserEngineToolAdapter)
            return self._blanks.without(delta, finished=finished) if tools else delta

        def _has_thought(self, prompt_token_ids: list[int] | None) -> bool:
            """Return whether the thoughts have ended, in the prompt or in the answer."""
            state = self._stream_state
            if not state.prompt_reasoning_checked:
                state.prompt_reasoning_checked = True
                state.reasoning_ended = self.is_reasoning_end(prompt_token_ids or [])
            return bool(state.reasoning_ended)

        def _take_forced(self, request: Any) -> None:
            """Read what vLLM's own grammar of demanded calls holds the model to, where there is no other."""
            found = self._tool_parser
            if own or found is None or not found.supports_required_and_named or not _is_demanded(request):
                return
            name = None if request.tool_choice == "required" else self._get_function_name(request)
            self._tool_parser = ForcedCalls(self.model_tokenizer, request.tools, name)

    Mended.__name__ = parser.__name__
    return Mended


def _in_place_of(tool_parser: type[Any] | None) -> type[Any] | None:
    """Return the parser that takes the place of one of vLLM's: itself, where none does."""
    form, tag = FORMS.get(tool_parser), TAGS.get(tool_parser)  # type: ignore[arg-type]  # None is no key
    if tool_parser is None or (form is None and tag is None):
        return tool_parser
    kept: dict[str, Any] = {"structural_tag_model": tag} if tag is not None else {}
    bases: tuple[type[Any], ...] = (tool_parser,)
    if form is not None:
        kept, bases = kept | {"form": form}, (WrittenCalls, tool_parser)
    return type(tool_parser.__name__, bases, kept)


# Calls that a request demands.


def _is_demanded(request: Any) -> bool:
    """Return whether the answer must be a call."""
    choice = request.tool_choice
    return bool(request.tools) and choice is not None and choice not in ("none", "auto")


def _held(request: Any, adjust: Callable[[Any], Any], *, in_json: bool = False) -> Any:
    """Adjust a request to a model's parsers.

    Args:
        in_json: whether a call is read that is written in the JSON of vLLM's own grammar of demanded calls.

    Raises:
        InvalidRequest: it demands a call, and nothing would hold the model to one.
    """
    if not _is_demanded(request):
        return adjust(request)
    before = request.extract_structured_outputs()
    request = adjust(request)
    made = request.extract_structured_outputs()
    if made is not None and made != before:
        if made.structural_tag is None and in_json:
            return request
        tag = json.loads(made.structural_tag or "{}").get("format", {})
        if _must(tag):
            return request
        if tag.get("type") == "triggered_tags" and _is_of_calls(tag, request):
            held = {"type": "structural_tag", "format": tag | {"at_least_one": True}}
            request.structured_outputs = StructuredOutputsParams(structural_tag=json.dumps(held))
            return request
    error = InvalidRequest(
        f"'tool_choice' demands a call, to which the parser of the model '{request.model}' cannot hold it: "
        "send 'auto', or set another `engines.serving.tool_call_parser` of its engine.",
        param="tool_choice",
    )
    if (call := CURRENT_CALL.get(None)) is not None:
        call.failure = error
    raise error


def _is_of_calls(tag: Any, request: Any) -> bool:
    """Return whether each tag is a call that the request's choice allows."""
    calls = [found for found in tag["tags"] if found["content"]["type"] == "grammar"]
    return len(calls) == len(tag["tags"]) and (request.tool_choice == "required" or len(request.tools) == 1)


def _must(found: Any) -> bool:
    """Return whether a part of a structural tag demands a tag."""
    match found.get("type"):
        case "tag":
            return bool(found["begin"])
        case "triggered_tags" | "token_triggered_tags" | "tags_with_separator":
            return bool(found.get("at_least_one"))
        case "sequence":
            return any(map(_must, found["elements"]))
        case "or":
            return all(map(_must, found["elements"]))
        case _:
            return False


GEMMA_ARGUMENTS = r"""
root ::= (pair ("," pair)*)?
pair ::= [^:,{}\[\]<"]+ ":" value
value ::= text | number | "true" | "false" | "null" | "[" (value ("," value)*)? "]" | "{" root "}"
text ::= "<|\"|>" ([^<] | "<" [^|])* "<|\"|>"
number ::= "-"? [0-9]+ ("." [0-9]+)? ([eE] [+\-]? [0-9]+)?
"""
"""The text that Gemma 4 writes between the braces of a call."""


@register_vllm_structural_tag("gemma4")  # type: ignore[untyped-decorator]  # vLLM has no types
def gemma_calls(
    tools: list[Any], _builtin_tools: list[Any], choice: str, _reasoning: bool, _suffix: str = ""
) -> StructuralTag:
    """Make the grammar of Gemma 4's calls, for which vLLM has none; arguments are held to no schema."""
    strict = [tool.function.parameters or {} for tool in tools if tool.function.strict]
    if strict and (call := CURRENT_CALL.get(None)) is not None:
        call.context.answer_headers[UNHELD_HEADER] = ", ".join(sorted(set().union(*strict)))
    tags = [
        TagFormat(
            begin=f"<|tool_call>call:{tool.function.name}{{",
            content=GrammarFormat(grammar=GEMMA_ARGUMENTS),
            end="}<tool_call|>",
        )
        for tool in tools
    ]
    if choice == "auto":
        return StructuralTag(format=TriggeredTagsFormat(triggers=["<|tool_call>"], tags=tags))
    return StructuralTag(
        format=TagsWithSeparatorFormat(
            tags=tags, separator="", at_least_one=True, stop_after_first=choice == "forced"
        )
    )


# Answers that were cut, and those in one piece.

ALIKE = frozenset({"KimiK3Parser", "CohereCommandParser"})
"""vLLM's parsers of single families whose streams are whole answers as well; the second has a package of its
own."""


def _was_cut() -> bool:
    call = CURRENT_CALL.get(None)
    return call is not None and call.cut


def _is_unclosed() -> bool:
    call = CURRENT_CALL.get(None)
    return call is not None and call.unclosed


def _whole(delta: DeltaMessage | None) -> tuple[str | None, str | None, list[FunctionCall] | None]:
    """Return thoughts, text and calls of a stream that came in one piece."""
    delta = delta or DeltaMessage()
    found: dict[int, FunctionCall] = {}
    for part in delta.tool_calls:
        function = part.function or DeltaFunctionCall()
        call = found.setdefault(part.index, FunctionCall(id=part.id, name=function.name or "", arguments=""))
        call.arguments += function.arguments or ""
    return delta.reasoning, delta.content, list(found.values()) or None


class _Blanks:
    """Leaves out white space before calls and between them, of which a response would make messages."""

    def __init__(self) -> None:
        self._blank = ""
        self._called = False

    def without(self, delta: DeltaMessage | None, *, finished: bool) -> DeltaMessage | None:
        """Return a piece of an answer, of whose text white space at the end waits for more."""
        delta = delta or DeltaMessage()
        text = self._blank + (delta.content or "")
        said = text.rstrip()
        self._called = self._called or bool(delta.tool_calls)
        self._blank = "" if delta.tool_calls else text[len(said) :]
        delta.content = (text if finished and not self._called else said) or None
        return delta if delta.content or delta.reasoning or delta.tool_calls else None


class _Harmony(HarmonyParser):
    """gpt-oss's parser that reads whole answers as streams, and leaves out a header that was cut."""

    def adjust_request(self, request: Any) -> Any:
        return _held(request, super().adjust_request)

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        ids = list(model_output_token_ids)
        return _whole(self.parse_delta(model_output, ids, request, finished=True))

    def flush(self) -> list[Segment]:
        segments = super().flush()
        raw = any(segment.delta for segment in segments)  # where it does not know what the tokens are
        messages = [segment.completed_message for segment in segments if segment.completed_message]
        empty = not any(message.content and message.content[0].text for message in messages)
        return [] if _was_cut() and (raw or empty) else segments


class _Unclosed:
    """Has a parser of vLLM's engine of parsers end at a cut without closing the call in which it stands.

    vLLM ends such a call as if it were complete: a name that was cut becomes a name, and what was written of
    the arguments becomes whole JSON.
    """

    def __init__(self, tool_parser: Any) -> None:
        self._tool_parser: Any = tool_parser
        self._engine: Any = None
        self._inside = False
        if isinstance(tool_parser, WrittenCalls):
            tool_parser.cut = True
        elif isinstance(tool_parser, ParserEngineToolAdapter):
            self._engine = tool_parser._parser_engine
            self._close, self._engine._engine.finish = self._engine._engine.finish, self._finish

    def _finish(self) -> list[SemanticEvent]:
        """Do what the engine does at its end, but for the end of a call."""
        states = self._engine._engine
        found: list[SemanticEvent] = states._process_scanner_items(states._scanner.flush_pending())
        left = states._lexer.flush()  # a mark that has begun is neither text nor an argument
        found.extend(states._process_lex_tokens([each for each in left if each.terminal != CONTENT_TERMINAL]))
        if states.state not in UNCLOSED:
            return [*found, *self._close()]
        between = states.config.tool_call_body_array and not states._array_in_element
        self._inside, states.state = states.tool_index >= 0 and not between, ParserState.CONTENT
        if written := states._args_buffer:
            states._args_buffer = ""
            found.append(
                SemanticEvent(EventType.ARG_VALUE_CHUNK, value=written, tool_index=states.tool_index)
            )
        return found

    def complete(self, delta: DeltaMessage | None) -> DeltaMessage | None:
        """Add the arguments that were written, and not sent: the engine waits for what bears structure."""
        inside = self._inside or (isinstance(self._tool_parser, WrittenCalls) and self._tool_parser.inside)
        if inside and (call := CURRENT_CALL.get(None)) is not None:
            call.unclosed = True
        slots = self._engine._tool_slots if self._inside else ()
        if not slots or not slots[-1].name_sent or self._engine._arg_converter is None:
            return delta
        if getattr(slots[-1], "extend_open_value", None) is not None:  # vLLM 0.33
            slots[-1].extend_open_value = None  # it would take what is given below for the end of a text
        last, structure = len(slots) - 1, "".join(self._engine._arg_structural_chars or ())
        if written := self._engine._compute_arg_delta(last, structure):
            delta = delta or DeltaMessage()
            delta.tool_calls = [
                *delta.tool_calls,
                DeltaToolCall(index=last, function=DeltaFunctionCall(arguments=written)),
            ]
        return delta


def _telling_cuts(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Have a whole chat say how its answer ended: vLLM says `tool_calls` of one that was cut."""

    async def told(*args: Any, **kwargs: Any) -> Any:
        answer, call = await generate(*args, **kwargs), CURRENT_CALL.get(None)
        for choice in getattr(answer, "choices", ()):
            reason = call.ended.get(choice.index, "stop") if call is not None else "stop"
            if choice.finish_reason == "tool_calls" and (reason != "stop" or _is_unclosed()):
                choice.finish_reason = reason
        return answer

    return told


def _telling_stops(generate: Callable[..., AsyncGenerator[str, None]]) -> Callable[..., AsyncIterator[str]]:
    """Have a streamed chat say `stop` where a stop string ended it within a call: vLLM says `tool_calls`."""

    async def told(events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        async with aclosing(events):
            async for event in events:
                yield event.replace(CALLED, STOPPED) if _is_unclosed() else event

    def generated(request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        events = generate(request, *args, **kwargs)
        return told(events) if request.tools and request.stop else events

    return generated
