"""A run's processes from outside: folder, addresses, placement, supervision, signs of life, and their end."""
