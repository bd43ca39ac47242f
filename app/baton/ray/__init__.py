"""Run gateways as replicas of a Ray Serve application: `serve run baton.ray:app`.

Each replica is a whole gateway with its own engines. Ray Serve starts, checks, scales and drains replicas, and
its HAProxy shares requests out between them; handoffs reach all through `handoffs.shared`.

Needs the extra `ray`: `pip install "vllm-baton[ray]"`.
"""

from __future__ import annotations

from importlib.util import find_spec

from baton.errors import StartError

if find_spec("ray") is None or find_spec("ray.serve") is None:
    raise StartError('baton.ray needs Ray Serve, which is not installed: pip install "vllm-baton[ray]"')

from baton.ray.application import app

__all__ = ["app"]
