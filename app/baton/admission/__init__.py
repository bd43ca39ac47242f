"""Decide who may call and when: API keys, limits of tenants, fair queues, memory for bodies."""
