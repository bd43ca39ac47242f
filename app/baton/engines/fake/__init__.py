"""An engine without a model, for tests of everything above an engine."""
