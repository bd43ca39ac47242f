"""Print vLLM's request and response schemas for Baton's OpenAPI document.

`make schemas` runs `python -m baton.engines.vllm.schemas` and writes `http/vllm_schemas.json`. The file is
checked in, so that the document needs no vLLM, and a change of vLLM's protocol shows as a change of the file.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import TypeAdapter

from baton.engines.vllm.handlers import HANDLERS

TEMPLATE = "#/components/schemas/{model}"


def schemas() -> dict[str, Any]:
    """Return `operations`, the request and response schema of each, and the `components` they refer to."""
    inputs: list[tuple[str, Any, TypeAdapter[Any]]] = []
    for operation, route in HANDLERS.items():
        inputs.append((f"{operation.value}:request", "validation", TypeAdapter(route.request)))
        inputs.append((f"{operation.value}:response", "serialization", TypeAdapter(route.response)))
    found, components = TypeAdapter.json_schemas(inputs, ref_template=TEMPLATE)
    operations: dict[str, dict[str, Any]] = {}
    for (key, _mode), schema in found.items():
        operation_name, _, side = str(key).partition(":")
        operations.setdefault(operation_name, {})[side] = schema
    return {"operations": operations, "components": components.get("$defs", {})}


def as_text() -> str:
    """Return the content of the file."""
    return json.dumps(schemas(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_text())
