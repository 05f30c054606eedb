"""Evaluation: the 15 benchmarks of the paper, through lm-evaluation-harness."""
