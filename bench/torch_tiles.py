"""The torch forward alone: reads a count of tiles a line, answers the seconds their forwards took."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """`torch_tiles.py MODEL_FOLDER BATCH`."""
    import torch
    from safetensors.torch import load_file

    from baton_geo.prithvi import PrithviConfig, PrithviSegmenter, load

    folder, batch = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    described = json.loads((folder / "config.json").read_text())
    config = PrithviConfig.from_hf(described)
    model = PrithviSegmenter(config)
    load(model, load_file(folder / "model.safetensors").items())
    model.eval()
    tile = described["baton_geo"]["tile"]
    tiles = torch.randn(batch, config.in_chans, config.num_frames, tile, tile)
    print("READY", flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            left = int(line)
            began = time.perf_counter()
            while left > 0:
                model(tiles[: min(batch, left)])
                left -= batch
            print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
