"""The embedded models, served without a download: list, prepare and verify them."""
