"""One step's samples: which rank takes which, in which minibatches, and what is known of the whole batch."""
