"""Shared by several rooms and owned by none; imports nothing of `attnres`."""
