"""Weights: Hugging Face folders to Megatron's parameters and back, and their broadcast to the servers."""
