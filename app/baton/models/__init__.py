"""The models Baton can serve without a download: where they come from and where they are kept."""
