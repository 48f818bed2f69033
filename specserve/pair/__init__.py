"""Checks of the target against its draft: vocabulary, heads, sampling.

No torch, no GPU, no engine.
"""
