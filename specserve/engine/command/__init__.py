"""Settings to the command line and environment of vLLM's server."""
