"""Logs, metrics, request ids, memory and progress: what the gateway reports about itself."""
