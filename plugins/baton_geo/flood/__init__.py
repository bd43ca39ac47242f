"""How `flood-tiny` came to be: made-up scenes of floods, the baselines it is measured beside, its training.

None of it is needed to serve the model. `scenes.make_scene` draws a scene, `baselines` measures the simple
methods, `train` makes the weights in `baton_geo/flood_tiny`, `scene` writes one scene as a GeoTIFF.
"""
