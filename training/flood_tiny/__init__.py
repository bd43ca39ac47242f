"""Train and evaluate `flood-tiny`, from a checkout: scripts that are not part of the installed distribution.

The training data are synthetic scenes of `training.flood_scenes`.

    python -m training.flood_tiny.baselines    fit and measure the methods it is compared with
    python -m training.flood_tiny.train        train, write `plugins/baton_geo/flood_tiny`, measure
"""
