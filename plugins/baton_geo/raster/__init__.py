"""Read client rasters and write masks in child processes; the gateway's side needs no raster library.

`Decoders.open` returns an `OpenScene`; `messages` defines what it exchanges with the child.
"""
