"""What runs in vLLM's own interpreter.

The standard library only, and the names of our environment variables.
"""
