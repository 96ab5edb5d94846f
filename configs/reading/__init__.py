"""YAML text and overrides become values that know their line; pydantic's errors become messages.
``configs/schema/`` says what the fields mean.
"""
