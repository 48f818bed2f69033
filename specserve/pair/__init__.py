"""What the checkpoints say: facts, vocabulary, heads and memory. No torch, no GPU, no engine."""
