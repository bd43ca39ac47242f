"""The prompts of requests that continue handoffs."""
