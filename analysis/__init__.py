"""What a model does across its depth: measured depth attention, and figures of it."""
