"""What a request asks of handoffs."""
