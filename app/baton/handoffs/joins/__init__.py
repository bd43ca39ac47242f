"""Join several handoffs into one context: their text, and their KV where it is moved."""
