"""Plain vLLM, offline, in the folder it is started in: `offline_geo.py MODEL [ENGINE_ARGS]`.

Without ENGINE_ARGS (JSON) the engine is the one of the README's code, which is run as it stands after our entry
points were called once more than vLLM calls them. Then every `scene*.tif` here is encoded, one after the other, with
a refused one between; masks are written beside them, and report.json lists what is left behind.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from support.geo_readme import blocks

import baton_geo


def engine_of_the_readme(model: str) -> Any:
    for _ in range(2):
        baton_geo.register()
        assert baton_geo.io_processor() == "baton_geo.plugin.GeoProcessor"
    (code,) = [block for block in blocks("python") if "LLM(" in block]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code.replace("MODEL", model), names)  # its `llm` is what is wanted
    return names["llm"]


def end(llm: Any) -> None:
    """As the README says."""
    (code,) = [block for block in blocks("python") if "shutdown()" in block]
    exec(code, {"llm": llm})


def engine_of(model: str, engine_args: str) -> Any:
    from vllm import LLM

    quick = {"skip_tokenizer_init": True, "mm_processor_cache_gb": 0, "enforce_eager": True}
    return LLM(model, **quick, gpu_memory_utilization=0.1, **json.loads(engine_args))


def refusal(llm: Any, data: dict[str, Any]) -> str:
    try:
        llm.encode({"data": data}, pooling_task="plugin", use_tqdm=False)
    except ValueError as error:
        return str(error)
    return ""


def answered(llm: Any, scene: Path) -> dict[str, Any]:
    content = base64.b64encode(scene.read_bytes()).decode()
    data = {"data": content, "data_format": "b64_json", "outputs": ["preview", "mask"]}
    (output,) = llm.encode({"data": data}, pooling_task="plugin", use_tqdm=False)
    answer = output.outputs
    (mask,) = answer.files
    scene.with_suffix(".mask").write_bytes(base64.b64decode(mask.data))
    return {
        "kind": type(answer).__name__,
        "format": answer.format,
        "classes": [c.name for c in answer.classes],
    }


def main() -> None:
    model, *engine_args = sys.argv[1:]
    llm = engine_of(model, *engine_args) if engine_args else engine_of_the_readme(model)
    report: dict[str, Any] = {"answers": [], "refusals": []}
    for scene in sorted(Path().glob("scene*.tif")):
        report["answers"].append(answered(llm, scene))
        report["refusals"].append(refusal(llm, {"data": b"II*\0", "data_format": "bytes"}))
    servers = [
        child for child in psutil.Process().children() if "baton_geo.raster.fork_server" in child.cmdline()
    ]
    report["servers"] = [server.pid for server in servers]
    report["children"] = sum(len(server.children()) for server in servers)
    made = Path(tempfile.gettempdir())
    report["files"] = [path.name for kind in ("scene-*", "baton-geo-*") for path in made.glob(kind)]
    Path("report.json").write_text(json.dumps(report))
    end(llm)


if __name__ == "__main__":
    main()
