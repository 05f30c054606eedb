"""Training of AttnRes models: text, parameter groups, and the demo that shows a retrofit from end to end."""
