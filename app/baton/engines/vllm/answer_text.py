"""Find the tokens of an answer that say what its client received."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from baton.engines.kv_transfer import TransferReport

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

AT_ONCE = 64
"""Tokens that are read without a pause: a millisecond or two of the event loop."""
CUT_WITHIN = 8
"""Most tokens before a cut that are tokenized again with the text between the last of them and the cut."""


@dataclass(frozen=True)
class AnswerText:
    """Finds the tokens of an answer that say the text which its client received.

    Attributes:
        tokenizer: the model's tokenizer.
        special: token ids that no text holds.
        params: how the answer was sampled and read.
    """

    tokenizer: Any
    special: frozenset[int]
    params: SamplingParams

    async def tokens(self, report: TransferReport, text: str) -> list[int] | None:
        """Return the token ids of an answer as its client received it.

        Left out are a token or text that stopped it, special tokens that no text shows, and a character that
        the answer's last tokens only begin. What remains of a token in which a stop string began is tokenized
        again.

        Args:
            report: the ids of the prompt and of the generated tokens.
            text: all text of the answer.

        Returns:
            None: no token ids say this text.
        """
        kept, shown, unshown, found = list[int](), list[str](), list[int](), 0
        pieces = await self._pieces(report.prompt_ids, report.output_ids)
        for token, piece in zip(report.output_ids, pieces, strict=True):
            if not piece:
                unshown += [token] if token not in self.special else []
            elif text.startswith(piece, found):
                kept += [*unshown, token]
                shown += [*([""] * len(unshown)), piece]
                unshown, found = [], found + len(piece)
            else:
                break
        return kept if found == len(text) else await self._cut(report.prompt_ids, kept, shown, text)

    async def _cut(
        self, prompt: list[int], kept: list[int], shown: Sequence[str], text: str
    ) -> list[int] | None:
        """Return token ids that begin with most of `kept` and say `text`."""
        for count in range(len(kept), max(-1, len(kept) - CUT_WITHIN), -1):
            rest = text[len("".join(shown[:count])) :]
            for written in (rest, rest.removeprefix(" ")):  # some tokenizers write a space before every text
                ids: list[int] = self.tokenizer.encode(written, add_special_tokens=False)
                if "".join(await self._pieces([*prompt, *kept[:count]], ids)) == rest:
                    return [*kept[:count], *ids]
        return None

    async def _pieces(self, before: list[int], tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds to those before, as vLLM's own detokenizer reads it."""
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer  # takes seconds, and is there by now

        params = SimpleNamespace(
            stop=None,
            min_tokens=0,
            include_stop_str_in_output=False,
            skip_special_tokens=self.params.skip_special_tokens,
            spaces_between_special_tokens=self.params.spaces_between_special_tokens,
        )
        request: Any = SimpleNamespace(
            request_id="", sampling_params=params, prompt_token_ids=before, prompt_embeds=None
        )
        detokenizer: Any = IncrementalDetokenizer.from_new_request(self.tokenizer, request)
        pieces = list[str]()
        for number, token in enumerate(tokens, 1):
            read = len(detokenizer.output_text)
            detokenizer.update([token], stop_terminated=False)
            pieces.append(detokenizer.output_text[read:])
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        return pieces


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the token ids of a tokenizer that are no text; of None, none."""
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset([*tokenizer.all_special_ids, *(token for token, each in added.items() if each.special)])
