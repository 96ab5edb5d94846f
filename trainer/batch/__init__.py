"""One step's samples: their division over ranks and minibatches, and the scalars of the whole batch."""
