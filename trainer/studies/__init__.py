"""Measurements on recorded or fixed tokens: ``tandem replay`` and the study of mismatch between layouts."""
