"""Give a raster's numbers their meaning: bands, units, valid pixels, areas, tiles."""
