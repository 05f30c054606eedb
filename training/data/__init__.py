"""Turn files and data sets into sequences of tokens: find, load, encode, cut and keep them."""
