"""The CycloneDX bill of materials of what `make serve` installs.

`sbom.py FOLDER` writes `vllm-baton-VERSION.cdx.json` there. It is made from the locks, so it needs only
cyclonedx-bom, and comes out the same every time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements-cpu.lock", "requirements-torch.lock", "requirements-models.lock")


def main() -> None:
    """Write the file, checked against CycloneDX's schema, and say where it is."""
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "app/baton/__init__.py").read_text())[0]
    place = Path(sys.argv[1]) / f"vllm-baton-{version}.cdx.json"
    command = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", "--output-reproducible"]
    command += ["--validate", "--spec-version", "1.6", "--pyproject", str(ROOT / "pyproject.toml"), "-"]
    pins = "".join((ROOT / lock).read_text() for lock in LOCKS)
    made = subprocess.run(command, input=pins, capture_output=True, text=True, check=True).stdout
    place.write_text(json.dumps(finished(json.loads(made), version), indent=2) + "\n")
    print(f"{place}: {len(json.loads(made)['components'])} components")


def finished(bill: dict[str, object], version: str) -> dict[str, object]:
    """With what the tool cannot know: our version, which hatchling reads; and that the locks are flat."""
    root = bill["metadata"]["component"]  # type: ignore[index]  # JSON, checked by the tool
    root |= {"version": version, "purl": f"pkg:pypi/vllm-baton@{version}"}
    references = [component["bom-ref"] for component in bill["components"]]  # type: ignore[attr-defined]  # as above
    for entry in bill["dependencies"]:  # type: ignore[attr-defined]  # as above
        if entry["ref"] == root["bom-ref"]:
            entry["dependsOn"] = sorted(references)
    return bill


if __name__ == "__main__":
    main()
