"""Read rasters: recognise the format, check the header, decode rows. In child processes only."""
