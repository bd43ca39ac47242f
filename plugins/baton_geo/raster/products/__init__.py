"""Make the products of a scene: blend the scores of its tiles, write mask, probabilities and preview."""
