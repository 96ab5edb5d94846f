"""Where the ranks of one node meet. Without torch: whoever starts them names it too."""

STORE_VARIABLE = "TANDEM_RANK_STORE"
"""In a rank's environment: the file that stands for the ranks' store, in place of MASTER_ADDR and
MASTER_PORT."""
