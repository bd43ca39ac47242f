"""Say what a raster's numbers mean: its bands, their units, which pixels are valid, their area and tiles."""
