"""Share the memory of GPUs out among the engines that use them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

from baton.config.groups import EngineSettings
from baton.errors import SettingsError

USABLE_SHARE = 0.92
"""Share of a GPU's memory that all its engines take together; vLLM's own default for one engine."""
LEAST_SHARE = 0.02


def gpus_of(engine: EngineSettings) -> tuple[str, ...]:
    """Return the GPUs that an engine uses: its `device_ids`, else the first ones that the process sees."""
    named = engine.args.get("device_ids")
    if isinstance(named, list) and named:
        return tuple(map(str, named))
    sizes = (int(engine.args.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline", "data"))
    return tuple(map(str, range(prod(sizes))))


def gpu_shares(engines: Sequence[EngineSettings]) -> dict[str, float]:
    """Return the share of its GPUs' memory that each engine may take, by the engine's name.

    An engine with `gpu_share` gets that; the others on the same GPU share what is left equally. An engine
    without `gpu_share` that has its GPUs for itself is left out: vLLM's default holds for it. Engines on
    demand get what those leave that always run, each all of it unless it names a share.

    Raises:
        SettingsError: an engine has two shares or `kv_cache_memory` beside one, the engines of one GPU take
            more than all of it, or GPUs are named by number here and by UUID there.
    """
    _require_one_naming(engines)
    staying = [engine for engine in engines if engine.start == "always"]
    shares = _shares_of(staying)
    for engine in engines:
        if engine.start == "on_demand":
            shares[engine.name] = _share_on_demand(engine, staying, shares)
    return shares


def _share_on_demand(
    engine: EngineSettings, staying: Sequence[EngineSettings], shares: Mapping[str, float]
) -> float:
    """Return the share of an engine on demand: its own, else all that engines leave which always run."""
    taken = max(
        sum(shares.get(other.name, USABLE_SHARE) for other in staying if gpu in gpus_of(other))
        for gpu in gpus_of(engine)
    )
    left, named = round(USABLE_SHARE - taken, 3), _named(engine)
    if engine.kv_cache_memory is not None:
        raise SettingsError(
            f"engines '{engine.name}': kv_cache_memory: with it vLLM heeds no share of a GPU: "
            "set `gpu_share` instead"
        )
    if left < LEAST_SHARE or (named is not None and named > left):
        raise SettingsError(
            f"engines '{engine.name}': engines that always run leave {max(0.0, left):g} of the memory of its "
            "GPUs: lower `gpu_share`, there or here"
        )
    return left if named is None else named


def _shares_of(engines: Sequence[EngineSettings]) -> dict[str, float]:
    """Return the shares of engines that run at the same time."""
    users: defaultdict[str, list[EngineSettings]] = defaultdict(list)
    for engine in engines:
        for gpu in gpus_of(engine):
            users[gpu].append(engine)
    for gpu, sharing in users.items():
        _require_room(gpu, sharing)
    shares = {}
    for engine in engines:
        named = _named(engine)
        shared = [_rest(users[gpu]) for gpu in gpus_of(engine) if len(users[gpu]) > 1]
        if named is not None:
            shares[engine.name] = named
        elif shared:
            shares[engine.name] = min(shared)
    return shares


def _named(engine: EngineSettings) -> float | None:
    """Return the share that the settings name; None: they name none."""
    ours, vllms = engine.gpu_share, engine.args.get("gpu_memory_utilization")
    if ours is not None and vllms is not None:
        raise SettingsError(
            f"engines '{engine.name}': gpu_share and args.gpu_memory_utilization mean the same: "
            "set one of them"
        )
    return ours if vllms is None else float(vllms)


def _rest(sharing: Sequence[EngineSettings]) -> float:
    """Compute the share of a GPU for each engine without one of its own."""
    named = [share for engine in sharing if (share := _named(engine)) is not None]
    unnamed = len(sharing) - len(named)
    return round((USABLE_SHARE - sum(named)) / unnamed, 3) if unnamed else 0.0


def _require_one_naming(engines: Sequence[EngineSettings]) -> None:
    named = {gpu.isdigit() for engine in engines for gpu in gpus_of(engine)}
    if len(named) > 1:
        raise SettingsError(
            "engines: some name their GPUs by UUID and others by number, or not at all: "
            "give all of them args.device_ids of one kind"
        )


def _require_room(gpu: str, sharing: Sequence[EngineSettings]) -> None:
    for engine in sharing:
        if engine.kv_cache_memory is not None and (len(sharing) > 1 or engine.gpu_share is not None):
            raise SettingsError(
                f"engines '{engine.name}': kv_cache_memory: with it vLLM heeds no share of GPU {gpu}: "
                "set `gpu_share` instead"
            )
    named = {engine.name: share for engine in sharing if (share := _named(engine)) is not None}
    total = sum(named.values())
    if len(sharing) > 1 and (total > 1 or (len(named) < len(sharing) and _rest(sharing) < LEAST_SHARE)):
        others = ", ".join(engine.name for engine in sharing if engine.name not in named)
        left = f" and leave nothing for {others}" if others else ""
        raise SettingsError(
            f"engines: {', '.join(named)} take {total:g} of the memory of GPU {gpu}{left}: "
            "lower `gpu_share`, or move an engine with args.device_ids"
        )
