"""Evaluate models on the 15 benchmarks of the paper and on other tasks, through lm-evaluation-harness."""
