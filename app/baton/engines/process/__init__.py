"""The processes of engines: find them, end them, release what they leave behind."""
