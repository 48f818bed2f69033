"""What a checkpoint's own files say. Read with bounds, never loaded; knows no vLLM."""
