"""Images that clients send: read under limits, checked, upright. Knows no HTTP server and no vLLM."""
