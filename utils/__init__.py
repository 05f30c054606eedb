"""Helpers that several folders of `attnres` share. They import nothing from the other folders."""
