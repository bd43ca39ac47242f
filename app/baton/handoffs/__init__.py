"""The relay's rules: what a handoff is, who may use it, how long it lives. Knows no vLLM and no HTTP."""
