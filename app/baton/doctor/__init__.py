"""Check the machine and the settings: `baton doctor`."""
