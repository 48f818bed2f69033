"""Calls to the engine: transport with deadlines, the OpenAI client, the metrics text."""
