"""Read checkpoints: their tables of tensors, configurations, tokenizers and the files beside the weights."""
