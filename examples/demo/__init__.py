"""Agents that hand their context to one another, beside the same agents passing text."""
