"""The relay: do what a request asks of handoffs."""
