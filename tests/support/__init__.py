"""Helpers that several tests share; no test lives here."""
