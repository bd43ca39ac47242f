"""Engines that are servers elsewhere: another Baton, plain `vllm serve`, or any with OpenAI's API."""
