"""The learner's engine: Megatron-Core models, packing, log-probs, weight transfer, checkpoints."""
