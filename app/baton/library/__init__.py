"""The library: keep handoffs, here and in the stores that machines share."""
