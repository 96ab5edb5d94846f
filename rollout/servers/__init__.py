"""SGLang servers from outside: start, watch, generation requests, weight updates, and end."""
