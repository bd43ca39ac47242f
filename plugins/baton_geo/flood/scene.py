"""Write the sample scene, for trying the model out: `python -m baton_geo.flood.scene scene.tif`.

It is a made-up flood of six bands and 128 x 128 pixels of 10 m: seed 9116 of `training.flood_scenes` in the
repository, which draws others of any size.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

SAMPLE = Path(__file__).with_name("scene.tif")


def main() -> None:
    """Copy the sample to the file that the command line names."""
    parser = argparse.ArgumentParser(
        "python -m baton_geo.flood.scene", description="Write a made-up satellite scene of a flood."
    )
    parser.add_argument("out", type=Path, help="File to write.")
    out: Path = parser.parse_args().out
    shutil.copyfile(SAMPLE, out)
    print(f"{out}: six bands of 128 x 128 pixels of 10 m, EPSG:32633")


if __name__ == "__main__":
    main()
