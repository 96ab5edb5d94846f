"""From YAML text and overrides to values that know their line, and from pydantic's errors to messages.
What a field means stands in ``configs/schema/``.
"""
