"""Names and functions that engine, gateway and clients share: architectures, placeholder token, prompts.

Pure: this module imports only the standard library, in milliseconds.
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
"""vLLM's class, and ours with latent steps. To add one, add a row here and a class in `models.py`."""

PLACEHOLDER_KEY = "baton_latent_placeholder"
"""Field of the model's configuration with the placeholder's token id; set by `hf_overrides`."""

MEMORY_KEY = "baton_latent.memory"
"""Key of the `LatentMemory` in vLLM's `static_forward_context`, where the KV connector finds it."""

CONNECTOR = "BatonConnector"
"""The KV connector that moves seeds together with their KV."""

SPARE_WORDS = ("reserved", "unused", "extra", "control", "dummy")
"""Parts of the names of unused tokens."""


class NoPlaceholder(ValueError):
    """No token of the model can be the placeholder of a latent step."""


def prepare_latent_prompt(token_ids: Sequence[int], steps: int, placeholder: int) -> list[int]:
    """Append the placeholders of latent steps to a prompt.

    Args:
        token_ids: the prompt, at least one token.
        steps: number of latent steps to append; 0 returns the prompt as it is.
        placeholder: token id of the placeholder, see `latent_overrides`.

    Example:
        >>> prepare_latent_prompt([5, 6, 7], steps=2, placeholder=63)
        [5, 6, 7, 63, 63]

    Raises:
        ValueError: the prompt is empty, or the number of steps is negative.
    """
    if steps < 0:
        raise ValueError("the number of latent steps must be 0 or more")
    if steps and not token_ids:
        raise ValueError("latent steps need a prompt of at least one token")
    return [*token_ids, *[placeholder] * steps]


def latent_overrides(folder: str | Path, placeholder: int | None = None) -> dict[str, Any]:
    """Return the `hf_overrides` with which vLLM serves the model in a folder with latent steps.

    Args:
        placeholder: token id of the placeholder; None uses `choose_placeholder`.

    Raises:
        ValueError: there is no config.json, its architecture is not in `LATENT_ARCHITECTURES`, or no token of
            the model can be the placeholder.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError("latent steps need a model in a local folder with its config.json, not a hub id")
    stock = next(iter(_read(Path(folder) / "config.json").get("architectures") or ()), None)
    if not isinstance(stock, str) or stock not in LATENT_ARCHITECTURES:
        known = ", ".join(LATENT_ARCHITECTURES)
        raise ValueError(f"latent steps support the architectures {known}; this model is {stock}")
    token = choose_placeholder(folder) if placeholder is None else placeholder
    return {"architectures": [LATENT_ARCHITECTURES[stock]], PLACEHOLDER_KEY: token}


def thinks(folder: str | Path, overrides: Mapping[str, Any]) -> bool:
    """Return whether vLLM serves the model in a folder with latent steps, given these `hf_overrides`."""
    named = overrides.get("architectures") or _read(Path(folder) / "config.json").get("architectures")
    return isinstance(named, list) and any(name in LATENT_ARCHITECTURES.values() for name in named)


def choose_placeholder(folder: str | Path) -> int:
    """Choose the placeholder's token id, the same at every start: one that text never contains.

    In this order: a special token whose name says that it is unused; a row of the embedding without a token;
    any special token that neither begins nor ends a text nor occurs in the chat template. Of several, the
    last.

    Raises:
        NoPlaceholder: there is no such token, or no tokenizer.json.
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
            "no unused token found in this model to be the placeholder of latent steps; "
            f'set its id as "{PLACEHOLDER_KEY}" in hf_overrides'
        )
    return max(free)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _added_tokens(root: Path) -> dict[str, int]:
    """Return the ids of special tokens by their text; they are never part of ordinary text."""
    rows = _read(root / "tokenizer.json").get("added_tokens") or []
    return {row["content"]: row["id"] for row in rows if row.get("special")}


def _known_tokens(root: Path) -> int:
    """Return one more than the tokenizer's highest id; 0 if it is unknown."""
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
    """Return the chat template and the named special tokens as one text, to search for tokens in use."""
    settings = _read(root / "tokenizer_config.json")
    named = [settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")]
    path = root / "chat_template.jinja"
    return json.dumps([named, settings.get("chat_template")], ensure_ascii=False) + (
        path.read_text() if path.is_file() else ""
    )
