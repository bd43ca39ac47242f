"""Plain vLLM's server with nothing of Baton but its wheel. A package, so that a server can be shared by its modules."""
