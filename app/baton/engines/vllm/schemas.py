"""vLLM's request and response schemas for our OpenAPI document: `python -m baton.engines.vllm.schemas`.

`make schemas` writes them to `api/vllm_schemas.json`, checked in, so that the document needs no vLLM and a
change of vLLM's protocol shows as a change of that file.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import TypeAdapter

from baton.engines.vllm.handlers import ROUTES

TEMPLATE = "#/components/schemas/{model}"


def schemas() -> dict[str, Any]:
    """`operations`: request and response schema by operation; `components`: what they refer to."""
    inputs: list[tuple[str, Any, TypeAdapter[Any]]] = []
    for operation, route in ROUTES.items():
        inputs.append((f"{operation.value}:request", "validation", TypeAdapter(route.request)))
        inputs.append((f"{operation.value}:response", "serialization", TypeAdapter(route.response)))
    found, components = TypeAdapter.json_schemas(inputs, ref_template=TEMPLATE)
    operations: dict[str, dict[str, Any]] = {}
    for (key, _mode), schema in found.items():
        operation_name, _, side = str(key).partition(":")
        operations.setdefault(operation_name, {})[side] = schema
    return {"operations": operations, "components": components.get("$defs", {})}


def as_text() -> str:
    """The file's content."""
    return json.dumps(schemas(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_text())
