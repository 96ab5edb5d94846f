"""Checks before anything starts: the config, its files, devices, disks, nodes. Nothing here starts a role."""
