"""KV that is moved behind a thought: tokens between are computed as they are in a request."""

from __future__ import annotations

from pathlib import Path

import pytest
from latent.reference import Reference
from latent.thinkers import SAID
from support.offline_engines import OWN, OfflineEngine, prompt, same

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from baton_kv.contract import PARAMS_KEY, params_to_save, transfer_params
from baton_latent import latent_overrides
from baton_latent.contract import PLACEHOLDER_KEY

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(300)]
MOVES = {"worker_extension_cls": "baton_kv.extension.BatonWorker", "enable_prefix_caching": False}


def test_where_everything_is_computed_again_behind_a_thought_nothing_differs(tmp_path: Path) -> None:
    """One token is moved to where it was, so that the pass before the request computes all behind the thought.

    The context ends with a latent step, which is computed there too, from the hidden state that was loaded.
    """
    model = ModelStore(load_settings().models_folder).resolve("smollm2")
    overrides = latent_overrides(model)
    reference = Reference(model, overrides[PLACEHOLDER_KEY])
    with OfflineEngine(tmp_path / "store", hf_overrides=overrides, **MOVES) as engine:
        engine.call("baton_enable_moves")
        context = [*prompt(45, seed=7), *[reference.placeholder] * 12]
        whole = [*context, *prompt(70, seed=21), *OWN]
        keys = []
        for asked in (context, whole):
            (answer,) = engine.ask((asked, 1, params_to_save()))
            engine.saved(answer["params"])
            keys.append(answer["params"][PARAMS_KEY]["load"])
        at = len(whole) - 3
        moved = [{"key": keys[1], "start": at, "tokens": 1, "to": at}]
        params = transfer_params(load=keys[0], moved=moved, apart="0123456789abcdef")
        joined, plain = engine.ask((whole, SAID, params), (whole, SAID, None))
        assert joined["cached"] == at + 1
        assert plain["tokens"] == reference.think(whole, SAID).tokens
        same(joined, plain)
        assert joined["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-4)
