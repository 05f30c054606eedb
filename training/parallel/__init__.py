"""Divide a model among processes: by its layers (pipeline), matrices, experts or the sequence."""
