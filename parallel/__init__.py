"""The learner's engine: Megatron-Core models, packing, vocab-parallel log-probs, weight transfer,
checkpoints."""
