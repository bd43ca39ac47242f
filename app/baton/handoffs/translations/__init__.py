"""Make a handoff of one model from what a handoff of another model says."""
