"""One engine process group, started, watched and ended."""
