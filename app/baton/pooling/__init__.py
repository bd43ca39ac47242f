"""IO processor plugins around an engine: parse, make prompts, encode, answer; both plugin generations."""
