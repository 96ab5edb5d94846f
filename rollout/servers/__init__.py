"""SGLang from outside: how servers are started, watched, asked for tokens, sent weights, and ended."""
