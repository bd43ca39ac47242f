"""Spectra of surfaces, water and air in six bands: blue, green, red, narrow NIR, SWIR 1 and SWIR 2.

Round figures chosen by hand, with the shapes of the USGS Spectral Library version 7 (doi:10.3133/ds1035) and,
for water, of Case 1 and Case 2 waters (IOCCG report 3, 2000): none is sampled from them, and none is exact.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from training.flood_scenes.noise import Field

BANDS: Final = ("BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2")


def _bands(*values: float) -> Field:
    return np.array(values, dtype=np.float64)


FOREST = _bands(0.022, 0.042, 0.028, 0.28, 0.13, 0.060)
GRASS = _bands(0.040, 0.070, 0.050, 0.32, 0.19, 0.100)
CROP = _bands(0.035, 0.075, 0.040, 0.42, 0.20, 0.090)
STUBBLE = _bands(0.080, 0.110, 0.140, 0.25, 0.32, 0.240)
SOIL = _bands(0.080, 0.110, 0.150, 0.22, 0.30, 0.260)
DARK_SOIL = _bands(0.045, 0.060, 0.075, 0.11, 0.16, 0.140)
SAND = _bands(0.170, 0.220, 0.270, 0.33, 0.40, 0.360)
REED = _bands(0.035, 0.060, 0.045, 0.24, 0.12, 0.060)
ASPHALT = _bands(0.070, 0.076, 0.080, 0.088, 0.095, 0.090)
ROOFS = np.array(
    [
        [0.200, 0.220, 0.240, 0.26, 0.27, 0.250],  # concrete
        [0.050, 0.052, 0.053, 0.055, 0.060, 0.058],  # bitumen
        [0.070, 0.100, 0.170, 0.24, 0.28, 0.220],  # tile
        [0.340, 0.360, 0.350, 0.33, 0.30, 0.270],  # metal
        [0.100, 0.090, 0.070, 0.06, 0.09, 0.070],  # solar panels
    ]
)
CLOUD = _bands(0.640, 0.620, 0.620, 0.64, 0.46, 0.360)

CLEAR_WATER = _bands(0.035, 0.028, 0.013, 0.006, 0.003, 0.002)
MUDDY_WATER = _bands(0.075, 0.120, 0.150, 0.11, 0.018, 0.010)
ALGAE_WATER = _bands(0.022, 0.060, 0.030, 0.06, 0.008, 0.004)
GLINT = _bands(0.035, 0.034, 0.033, 0.032, 0.029, 0.026)
# Attenuation down and up per metre: of water alone, and what sediment adds.
CLEAR_ATTENUATION = _bands(0.1, 0.15, 0.8, 8.0, 60.0, 90.0)
MUDDY_ATTENUATION = _bands(3.0, 2.4, 2.0, 3.0, 5.0, 5.0)

# Skylight on a shaded place, as a share of full light.
SKYLIGHT = _bands(0.40, 0.31, 0.24, 0.16, 0.10, 0.08)
HAZE_PATH = _bands(0.120, 0.095, 0.075, 0.050, 0.020, 0.012)
CIRRUS_PATH = _bands(0.075, 0.075, 0.075, 0.075, 0.055, 0.045)
# Water in soil darkens it (Lobell and Asner 2002, doi:10.2136/sssaj2002.7220): exponent at saturation.
SOIL_WATER = _bands(0.40, 0.42, 0.46, 0.65, 1.40, 1.80)
