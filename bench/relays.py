"""Count relays whose answer differs from a computed one, over admitted families. `make bench-relays`.

A relay: A's context is computed and saved, B's prompt goes on after it from the loaded KV, and B's eight
greedy tokens are compared with those of the same engine computing the whole prompt. Tiny random models in
float32, one of each family that vLLM's CPU backend computes in float32 (gated delta nets it does not;
`tests/connector/test_states.py` compares those), contexts of 1 to 400 tokens, 32 at once.

A run is a slice: it takes `--minutes`, and adds to the counts in `--counts`, from which the next one goes on
with other contexts. What differs is written there whole, so that it can be repeated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from servers import machine

TESTS = Path(__file__).parents[1] / "tests"
TINY = TESTS / "connector" / "tiny_models.py"
sys.path.insert(0, str(TESTS))

from support.made_models import make_models  # noqa: E402  # the tests' models and engines
from support.offline_engines import OWN, OfflineEngine  # noqa: E402

from baton_kv.contract import PARAMS_KEY, params_to_save, transfer_params  # noqa: E402

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {},
    "gemma": {},
    "gemma3": {},
    "gpt-oss": {},
    "gemma4": {},
    "granite4": {"enable_prefix_caching": False},
}
"""Tiny models, and what their engines are started with."""
AT_ONCE, LONGEST, THEN = 32, 400, 8
GOAL = 100_000
Counts = dict[str, dict[str, Any]]


def relays(engine: OfflineEngine, chance: random.Random, count: dict[str, Any]) -> None:
    """So many relays at once."""
    prompts = [
        [chance.randrange(1, 40_000) for _ in range(chance.randint(1, LONGEST))] for _ in range(AT_ONCE)
    ]
    engine.forget_prefixes()
    left = engine.ask(*((prompt, chance.randint(1, 6), params_to_save()) for prompt in prompts))
    entries = [engine.saved(answer["params"]) for answer in left]
    whole = [
        [*prompt, *answer["tokens"], *OWN[: chance.randint(1, 4)]]
        for prompt, answer in zip(prompts, left, strict=True)
    ]
    keys = [answer["params"][PARAMS_KEY]["load"] for answer in left]
    engine.forget_prefixes()
    loaded = engine.ask(
        *((tokens, THEN, transfer_params(load=key)) for tokens, key in zip(whole, keys, strict=True))
    )
    engine.forget_prefixes()
    computed = engine.ask(*((tokens, THEN, None) for tokens in whole))
    for tokens, one, other in zip(whole, loaded, computed, strict=True):
        count["relays"] += 1
        count["loaded"] += one["cached"] > 0
        if one["tokens"] != other["tokens"]:
            differs = {"prompt": tokens, "loaded": one["tokens"], "computed": other["tokens"]}
            count["different"].append(differs | {"cached": one["cached"]})
    for path in {path for entry in entries for path in entry.parent.glob(f"{entry.stem}.*")}:
        path.unlink(missing_ok=True)


def slice_of(family: str, models: Path, folder: Path, seconds: float, counts: Counts) -> None:
    """One family's part of a slice."""
    count = counts.setdefault(family, {"relays": 0, "loaded": 0, "different": []})
    store = folder / family / "store"
    store.parent.mkdir()
    with OfflineEngine(store, model=str(models / family), max_num_seqs=AT_ONCE, **FAMILIES[family]) as engine:
        until = time.monotonic() + seconds
        while time.monotonic() < until and count["relays"] < GOAL / len(FAMILIES):
            relays(engine, random.Random(f"{family} {count['relays']}"), count)


def main() -> None:
    """Run a slice, and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument(
        "--counts", type=Path, default=Path("relays.json"), help="file that counts are kept in"
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options = parser.parse_args()
    counts: Counts = json.loads(options.counts.read_text()) if options.counts.exists() else {}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        models = make_models(TINY, Path(folder) / "models")
        for family in options.families:
            seconds = options.minutes * 60 / len(options.families)
            slice_of(family, models, Path(folder), seconds, counts)
            options.counts.write_text(json.dumps(counts, indent=1))
    print(f"`make bench-relays ARGS='{' '.join(sys.argv[1:])}'`, {datetime.date.today()}, {machine()}\n")
    print("| family | relays | from loaded KV | different |\n|---|---|---|---|")
    rows: list[tuple[Any, ...]] = [
        (name, each["relays"], each["loaded"], len(each["different"])) for name, each in counts.items()
    ]
    for name, made, loaded, different in [
        *rows,
        ("all", *(sum(row[at] for row in rows) for at in (1, 2, 3))),
    ]:
        print(f"| {name} | {made:,} | {loaded:,} | {different} |")


if __name__ == "__main__":
    main()
