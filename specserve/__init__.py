"""specserve: speculative decoding that is safe to run in production, on top of vLLM."""

__version__ = "0.1.0"
