"""Store answers of `/v1/responses`, so that a request may continue one by its id."""
