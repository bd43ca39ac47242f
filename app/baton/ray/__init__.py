"""Run gateways as replicas of a Ray Serve application: `serve run baton.ray:app`.

Each replica is a whole gateway with its own engines. Ray Serve starts, checks, scales and drains replicas,
and its HAProxy distributes requests; handoffs reach all replicas through `handoffs.shared`.

Needs the extra `ray`: `pip install "vllm-baton[ray]"`.
"""

from __future__ import annotations

from baton.errors import StartError

try:
    import ray.serve  # noqa: F401  # for the error that names the fix
except ImportError as error:
    raise StartError(
        'baton.ray needs Ray Serve, which is not installed: pip install "vllm-baton[ray]"'
    ) from error

from baton.ray.application import app

__all__ = ["app"]
