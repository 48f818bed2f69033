"""The engine's own words: phases of its start, and what its last lines mean."""
