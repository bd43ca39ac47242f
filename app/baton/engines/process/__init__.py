"""Engine processes: find them, kill them, and release what they leave behind."""
