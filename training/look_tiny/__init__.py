"""Train and examine `look-tiny`, the small vision model that ships with the vision plugin.

Run from a checkout; nothing here is in the wheel or imported when the model is served.
"""
