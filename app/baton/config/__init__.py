"""The settings: `groups` has their classes, `settings` reads them, the rest is the environment."""
