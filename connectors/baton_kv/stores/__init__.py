"""Stores of entries: the interface (`base`), a folder (`file`), and memory for tests (`memory`)."""
