"""Pooling through IO processor plugins: their steps around an engine's encode, without stalling anything."""
