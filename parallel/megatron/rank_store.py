"""The meeting point of one node's ranks. Without torch, since the supervisor that starts them imports it too."""

STORE_VARIABLE = "TANDEM_RANK_STORE"
"""Environment variable of a rank: the file of the ranks' store, instead of MASTER_ADDR and MASTER_PORT."""
