"""Draw synthetic satellite scenes of floods: the data that `flood-tiny` is trained and tested on.

`scenes.make_scene` draws a scene and its truth; `python -m training.flood_scenes.scene` writes one as a
GeoTIFF. The package ships one of them (`baton_geo.flood.scene`).
"""
