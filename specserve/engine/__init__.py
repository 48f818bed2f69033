"""Everything that is true only of vLLM: flags, environment, metrics, HTTP client, failures."""
