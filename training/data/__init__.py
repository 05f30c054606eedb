"""Turn files and data sets into sequences of tokens: find, load, encode, cut and keep them."""

IGNORED = -100  # the label that the loss leaves out, as in PyTorch
