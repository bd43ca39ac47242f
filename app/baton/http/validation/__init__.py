"""Validate a request's body before an engine sees it: its JSON, fields, schemas and patterns."""
