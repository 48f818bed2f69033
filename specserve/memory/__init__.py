"""The plan of GPU memory: what the engine will take, term by term, and what is left for the KV
cache.
"""
