"""Client rasters, read and written in child processes; the gateway's side needs no raster library.

`Decoders.open` gives a `Scene`; `ask` holds the messages that cross to the child.
"""
