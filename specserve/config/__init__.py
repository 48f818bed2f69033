"""The config file: its schema, and how file, environment and flags become one Settings."""
