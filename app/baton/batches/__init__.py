"""Files of clients, and batches of requests that run while nobody else asks: OpenAI's Files and Batches."""
