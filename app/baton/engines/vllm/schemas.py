"""Write vLLM's request and response schemas for Baton's OpenAPI document.

`make schemas` runs `python -m baton.engines.vllm.schemas` and writes `http/vllm_schemas.json`; of another
vLLM than the lock's it writes what differs there, into a file with its version. They are checked in, so that
the document needs no vLLM, and a change of vLLM's protocol shows as a change of a file.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from baton.engines.vllm.handlers import HANDLERS
from baton.engines.vllm_version import VLLM_VERSIONS, installed_vllm, minor_of

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


def write(folder: Path) -> None:
    """Write the file of the installed vLLM."""
    found, minor = schemas(), minor_of(installed_vllm() or "")
    name = "vllm_schemas.json"
    if minor != VLLM_VERSIONS[0]:
        usual = json.loads((folder / name).read_text())
        found = {
            part: {key: schema for key, schema in found[part].items() if usual[part].get(key) != schema}
            for part in found
        }
        name = f"vllm_schemas_{minor}.json"
    (folder / name).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write(Path(str(files("baton.http"))))
