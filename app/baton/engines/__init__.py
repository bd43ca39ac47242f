"""Engines behind one interface (`port`): vLLM's, and one that generates nothing real, for tests."""
