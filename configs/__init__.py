"""Configuration: pydantic schema, YAML loader, recipes. Imports pydantic and yaml only (no torch)."""
