"""Where handoffs are kept."""
