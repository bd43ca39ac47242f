"""Engines that are servers elsewhere."""
