"""The store of entries: the interface (`base`); a folder (`file`), its names (`tree`) and budget (`room`)."""
