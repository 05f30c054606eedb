"""Train a model on several processes: by pipeline, FSDP2, tensor, expert and sequence parallelism."""
