"""Where entries are kept: bytes in, bytes out. A networked store is one more file here."""
