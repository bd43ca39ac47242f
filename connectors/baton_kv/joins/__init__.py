"""Move KV of several entries to other places of one context, and compute the tokens between them."""
