"""Helpers that several packages of `attnres` share and none owns. They import nothing of the other packages."""
