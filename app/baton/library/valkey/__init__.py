"""Handoffs in a store that several gateways share."""
