"""Code for the core of an engine, beside vLLM: grammars that go on where a lost core was.

A core compiles a request's grammar and begins at its start. The request that goes on has what was said behind
its prompt, and in its sampling parameters how many tokens that is: its grammar accepts them first, one by
one, as the lost core's did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.config import SchedulerConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SAID_KEY = "baton_said"
"""Key of `extra_args` with the number of tokens at the prompt's end that the model said."""


class CoreConfig(SchedulerConfig):  # type: ignore[misc]  # vLLM has no types
    """The settings of a core's scheduler, which the core asks for its class with all that it has built."""

    def get_scheduler_cls(self) -> Any:
        own: Any = super().get_scheduler_cls()

        def scheduler(**parts: Any) -> Any:
            advance_grammars(parts["structured_output_manager"])
            return own(**parts)

        return scheduler


def with_core(config: VllmConfig) -> VllmConfig:
    """Have the core of an engine that is started with a configuration run what is here."""
    config.scheduler_config.__class__ = CoreConfig  # its fields are checked, and pickled, as they are
    return config


def advance_grammars(manager: Any) -> None:
    """Have a core's grammars accept what the model has said before.

    Args:
        manager: vLLM's `StructuredOutputManager`, which compiles them in threads.
    """
    compiled: Callable[[Any], Any] = manager._create_grammar

    def create(request: Any) -> Any:
        grammar = compiled(request)
        said = (request.sampling_params.extra_args or {}).get(SAID_KEY, 0)
        if said:
            _accept(manager, request, grammar, said)
        return grammar

    manager._create_grammar = create


def _accept(manager: Any, request: Any, grammar: Any, said: int) -> None:
    """Have a new grammar accept the last tokens of a prompt.

    Raises:
        ValueError: it does not; the request ends with an error.
    """
    begun = request.structured_output_request
    state = replace(begun)
    state.grammar = grammar
    prompt = request.prompt_token_ids[:-said]
    then = SimpleNamespace(
        request_id=request.request_id,
        use_structured_output=True,
        structured_output_request=state,
        prompt_token_ids=prompt,
        all_token_ids=list(prompt),
    )
    for token in request.prompt_token_ids[-said:]:
        then.all_token_ids.append(token)
        if not manager.accept_tokens(then, [token]):
            raise ValueError("The grammar does not allow what was said.")
    begun.reasoning_ended, begun.reasoner = state.reasoning_ended, state.reasoner
