"""Start a model from one vector that stands for another model's last thought, as AVP's Rosetta does.

Experimental. The distribution of the other model's next token, at the end of the handoff's context, weighs
the embeddings of the same tokens in this model; their mean, scaled to the mean length of an embedding, is the
input of the first position. Formula: `softmax(h W_X^T) E_Y` of AVP 0.6.2 (`avp.rosetta`), of which the
likeliest tokens are taken. On the models tried it carried nothing: see docs/results/joins.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.admission.tenants import Admission, Ticket
from baton.engines.backend import EngineState, Json, Operation, WholeReply
from baton.engines.engine import LocalEngine
from baton.engines.transfers import TransferRequest
from baton.errors import GenerationFailed, HandoffIncompatible, InvalidRequest, OperationUnsupported
from baton.images.image import ClientImage
from baton.library.handoff import Handoff
from baton.library.library import Library
from baton.relay.asked import WRITTEN_BY_THE_ENGINE, HandoffOptions
from baton.relay.plan import Plans, salt_of
from baton.relay.prompt.chat import ContextPrompt, Writer, write_prompt
from baton.relay.prompt.text import EngineText, shift_images
from baton.relay.run import PlannedRequest
from baton.relay.sources import is_compatible
from baton.telemetry.ids import RequestContext, new_request_id
from baton_kv.contract import Mixture

LIKELIEST = 20
"""Tokens of the distribution that are taken: vLLM's default for `max_logprobs`."""
WHERE = "handoff.translate"


@dataclass(frozen=True)
class Rosetta:
    """Plans requests that start from another model's last thought.

    Attributes:
        admission: gives places at the engines.
        enabled: whether the settings allow it.
    """

    engines: Sequence[LocalEngine]
    handoffs: Library
    plans: Plans
    admission: Admission
    enabled: bool

    def require_possible(self, engine: LocalEngine, operation: Operation, options: HandoffOptions) -> None:
        """Refuse a request that cannot start from a thought.

        Raises:
            OperationUnsupported: the settings, the engine or the operation do not allow it.
            InvalidRequest: the request saves a handoff, or does not name exactly one.
        """
        if not self.enabled:
            raise OperationUnsupported(
                "Continuing another model's last thought is experimental: set `handoffs.rosetta = true` to "
                'try it, or use "translate": true, which continues its text.',
                param=WHERE,
            )
        if engine.placeholder is None or operation in WRITTEN_BY_THE_ENGINE:
            raise OperationUnsupported(
                f"The engine '{engine.name}' needs `latent = true`, and the request must be one of "
                "/v1/completions or /v1/chat/completions.",
                param=WHERE,
            )
        if options.saving is not None or len(options.sources) != 1:
            raise InvalidRequest(
                "A request that starts from another model's last thought names one handoff and saves none: "
                "its context is no text that could be computed again.",
                param=WHERE,
            )

    def is_target(self, engine: LocalEngine) -> bool:
        """Return whether AVP's settings let thoughts of some model stand for its handoffs on this engine."""
        return self.enabled and any(target == engine.name for _, target in self._pairs)

    @property
    def _pairs(self) -> set[tuple[str, str]]:
        return {pair for each in self.engines for pair in each.rosetta_pairs}

    def is_default(
        self,
        engine: LocalEngine,
        operation: Operation,
        options: HandoffOptions,
        records: Sequence[Handoff],
    ) -> bool:
        """Return whether AVP's settings let a thought stand for the handoff that a request names."""
        starts = engine.placeholder is not None and operation not in WRITTEN_BY_THE_ENGINE
        if not self.enabled or not starts or options.translate is not None:
            return False
        if len(records) != 1 or options.saving is not None:
            return False
        return (records[0].model, engine.name) in self._pairs

    async def open(
        self,
        engine: LocalEngine,
        operation: Operation,
        body: Json,
        context: RequestContext,
        record: Handoff,
        images: Sequence[ClientImage],
    ) -> PlannedRequest:
        """Plan a request that starts from the last thought of a handoff; call it before it takes a place.

        Args:
            images: the images of the request, in the order of its prompt.

        Raises:
            HandoffIncompatible: no engine here can tell the thought, the models share none of its tokens, or
                `max_logprobs` is too small.
        """
        same = [each for each in self.engines if each.weights == record.weights]
        able = [each for each in same if each.placeholder is not None and is_compatible(record, each)]
        theirs = next((each for each in able if each.state is EngineState.READY), able[0] if able else None)
        if theirs is None:
            raise HandoffIncompatible(
                f"No engine with `latent = true` here serves '{record.model}', the model of this thought.",
                param="handoff.from",
            )
        chances = await self._next_token(theirs, context, record)
        self.handoffs.note_use(record, "rosetta", None, loaded=0, resident=0)
        mixture = await _in_their_tokens(EngineText(theirs, context), EngineText(engine, context), chances)
        shown: Json = {
            "id": record.id,
            "outcome": "rosetta",
            "exact": False,
            "from_model": record.model,
            "tokens": len(record.tokens),
            "mixed_tokens": len(mixture.tokens),
            "dropped": {"latent_steps": record.latent_steps, "tokens": len(record.tokens)},
        }
        writer = Writer(engine, context, images)
        prompt = await write_prompt(writer, None, [], operation, body, prompt_only=False, latent=True)
        return self._planned(engine, context, prompt, mixture, shown)

    def _planned(
        self,
        engine: LocalEngine,
        context: RequestContext,
        prompt: ContextPrompt,
        mixture: Mixture,
        shown: Json,
    ) -> PlannedRequest:
        """Plan a request whose first position is a mixture of token embeddings; nothing of it is saved."""
        assert prompt.tokens is not None
        assert engine.placeholder is not None
        transfer = TransferRequest(
            [engine.placeholder, *prompt.tokens],
            shift_images(prompt.images, 1),
            latent_steps=1,
            mixture=mixture,
            salt=context.request_id,
        )
        return PlannedRequest(
            self.handoffs,
            self.plans.metrics,
            self.plans.audits,
            engine,
            context,
            prompt,
            transfer,
            source=None,
            decision=None,
            target=None,
            thought=shown,
        )

    async def _next_token(
        self, engine: LocalEngine, context: RequestContext, record: Handoff
    ) -> dict[int, float]:
        """Return the probabilities of the likeliest next tokens after a handoff's context, by token id."""
        transfer = TransferRequest(
            list(record.tokens),
            await self.handoffs.images(record),
            load=record.key if record.bytes else None,
            latent_steps=record.latent_steps,
            salt=salt_of(record, []),
        )
        body = {"model": engine.name, "prompt": list(record.tokens), "max_tokens": 1, "temperature": 0}
        body |= {"logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
        ticket, own = Ticket(), replace(context, request_id=new_request_id())
        try:
            await self.admission.enter(ticket, context.tenant, engine.base)
            reply = await engine.call(Operation.COMPLETIONS, body, own, transfer)
        except InvalidRequest as error:
            if "logprobs" not in error.message:
                raise
            raise HandoffIncompatible(
                f"The engine '{engine.name}' does not tell its {LIKELIEST} likeliest tokens, which stand for "
                f"a thought: its `max_logprobs` must be at least {LIKELIEST}.",
                param="handoff.from",
            ) from error
        finally:
            ticket.answered()
        if not isinstance(reply, WholeReply):
            raise GenerationFailed()
        found = json.loads(reply.body)["choices"][0]["logprobs"]["top_logprobs"][0]
        return {int(name.rpartition(":")[2]): math.exp(log) for name, log in found.items()}


async def _in_their_tokens(ours: EngineText, theirs: EngineText, chances: dict[int, float]) -> Mixture:
    """Return a distribution over one model's tokens as a mixture of another's, of those that both have."""
    found: dict[int, float] = {}
    for token, chance in chances.items():
        text = await ours.detokenize([token])
        same = await theirs.tokenize(text) if text else []
        if len(same) == 1:
            found[same[0]] = found.get(same[0], 0.0) + chance
    total = sum(found.values())
    if not total:
        raise HandoffIncompatible(
            "The two models share none of the tokens of this thought.", param="handoff.from"
        )
    return Mixture(tokens=list(found), weights=[weight / total for weight in found.values()])
