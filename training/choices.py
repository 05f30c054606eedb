"""What a recipe chooses from by name; here, apart from what they name, so that reading a recipe imports no PyTorch."""

BAD_ROWS = ("error", "skip")
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd")
