"""Training of AttnRes models: text, parameter groups, and the demo."""
