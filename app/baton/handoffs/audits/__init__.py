"""Audits: compute some answers again without stored KV, and compare."""
