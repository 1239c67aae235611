"""The servers that are measured under load, each a process with its settings."""
