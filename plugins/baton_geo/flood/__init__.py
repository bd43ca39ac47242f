"""Draw synthetic satellite scenes of floods, to try the model out and to train it.

`scenes.make_scene` draws a scene and its truth; `python -m baton_geo.flood.scene` writes one as a GeoTIFF.
Serving the model needs neither.
"""
