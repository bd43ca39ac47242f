"""What crosses a process: which architectures think, what stands for a step, how a prompt asks for steps.

Pure: the standard library only, and it imports in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LATENT_ARCHITECTURES: Mapping[str, str] = {
    "Qwen2ForCausalLM": "BatonLatentQwen2ForCausalLM",
    "LlamaForCausalLM": "BatonLatentLlamaForCausalLM",
    "MistralForCausalLM": "BatonLatentMistralForCausalLM",
    "GemmaForCausalLM": "BatonLatentGemmaForCausalLM",
}
"""vLLM's own class, and ours that thinks. One more is a row here and a class in `models.py`."""

PLACEHOLDER_KEY = "baton_latent_placeholder"
"""The field of the model's configuration that names the placeholder; `hf_overrides` sets it."""

MEMORY_KEY = "baton_latent.memory"
"""Under this name the model's seeds stand in vLLM's `static_forward_context`, for whoever moves KV blocks."""

CONNECTOR = "BatonConnector"
"""The KV connector that moves seeds with their KV."""

SPARE_WORDS = ("reserved", "unused", "extra", "control", "dummy")
"""What the names of tokens nobody uses have in them."""


class NoPlaceholder(ValueError):
    """No token of this model can stand for a latent step."""


def prepare_latent_prompt(token_ids: Sequence[int], steps: int, placeholder: int) -> list[int]:
    """A prompt after which the model thinks so many steps before it answers.

    Args:
        token_ids: the prompt, at least one token, without the placeholder unless it already asks for steps.
        steps: how many latent steps follow it; 0 gives the prompt as it was.
        placeholder: the token id that stands for a step, see `latent_overrides`.

    Raises:
        ValueError: there is nothing to think about, or the number of steps is negative.
    """
    if steps < 0:
        raise ValueError("the number of latent steps is 0 or more")
    if steps and not token_ids:
        raise ValueError("latent steps follow a prompt of at least one token")
    return [*token_ids, *[placeholder] * steps]


def latent_overrides(folder: str | Path, placeholder: int | None = None) -> dict[str, Any]:
    """vLLM's `hf_overrides` under which the model in a folder thinks.

    Args:
        folder: where its config.json and tokenizer are.
        placeholder: the token id that stands for a step; None: `choose_placeholder`.

    Raises:
        ValueError: its architecture is not one of `LATENT_ARCHITECTURES`, or no token is spare.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError("latent steps need the model in a folder of this machine, with its config.json")
    stock = next(iter(_read(Path(folder) / "config.json").get("architectures") or ()), None)
    if not isinstance(stock, str) or stock not in LATENT_ARCHITECTURES:
        known = ", ".join(LATENT_ARCHITECTURES)
        raise ValueError(f"latent steps are for models of these architectures: {known}; this is {stock}")
    token = choose_placeholder(folder) if placeholder is None else placeholder
    return {"architectures": [LATENT_ARCHITECTURES[stock]], PLACEHOLDER_KEY: token}


def thinks(folder: str | Path, overrides: Mapping[str, Any]) -> bool:
    """Whether the model in a folder is served by a class that thinks, under these `hf_overrides`."""
    named = overrides.get("architectures") or _read(Path(folder) / "config.json").get("architectures")
    return isinstance(named, list) and any(name in LATENT_ARCHITECTURES.values() for name in named)


def choose_placeholder(folder: str | Path) -> int:
    """The token id that stands for a step, the same at every start: a special one the model has no use for.

    First those whose name says that they are spare, then a row of the embedding that no token has, then any
    special token that neither begins nor ends a text nor is in the chat template; of several the last.

    Raises:
        NoPlaceholder: there is none, or no tokenizer.json to look into.
    """
    root = Path(folder)
    config, added = _read(root / "config.json"), _added_tokens(root)
    used = _used_tokens(root, config)
    free = {token: text for text, token in added.items() if token not in used and text not in _template(root)}
    vocabulary = int(config.get("vocab_size") or 0)
    free = {token: text for token, text in free.items() if token < vocabulary}
    spare = [token for token, text in free.items() if any(word in text.lower() for word in SPARE_WORDS)]
    if spare:
        return max(spare)
    if 0 < _known_tokens(root) < vocabulary:
        return vocabulary - 1
    if not free:
        raise NoPlaceholder(
            "no token of this model is spare enough to stand for a latent step: name one yourself, "
            f'as "{PLACEHOLDER_KEY}" in hf_overrides'
        )
    return max(free)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _added_tokens(root: Path) -> dict[str, int]:
    """Special tokens by their text: never part of ordinary text, and one id each."""
    rows = _read(root / "tokenizer.json").get("added_tokens") or []
    return {row["content"]: row["id"] for row in rows if row.get("special")}


def _known_tokens(root: Path) -> int:
    """One more than the highest id the tokenizer can give; 0 where that cannot be told."""
    tokenizer = _read(root / "tokenizer.json")
    words = tokenizer.get("model", {}).get("vocab")
    if not words:
        return 0
    ids = list(words.values()) if isinstance(words, dict) else [len(words) - 1]
    ids += [row["id"] for row in tokenizer.get("added_tokens") or []]
    return 1 + int(max(ids))


def _used_tokens(root: Path, config: Mapping[str, Any]) -> set[int]:
    used: set[int] = set()
    for source in (config, _read(root / "generation_config.json")):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
            value = source.get(name)
            used.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return used


def _template(root: Path) -> str:
    """Everything where a special token's text may be in use, as one text."""
    settings = _read(root / "tokenizer_config.json")
    named = [settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")]
    path = root / "chat_template.jinja"
    return json.dumps([named, settings.get("chat_template")], ensure_ascii=False) + (
        path.read_text() if path.is_file() else ""
    )
