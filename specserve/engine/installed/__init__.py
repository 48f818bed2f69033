"""What the installed vLLM is and supports, and what is known to go wrong with it."""
