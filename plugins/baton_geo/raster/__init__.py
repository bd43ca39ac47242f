"""Read client rasters and write masks in child processes; the gateway's side needs no raster library.

`Decoders.open` returns an `OpenScene`; `messages` defines what it exchanges with the child. `fork_server`
makes the children; in each, `child` answers and does the work, with `reading`, `pixels` and `products`.
"""
