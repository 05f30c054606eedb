"""The memory of this machine."""


def free_memory() -> int:
    """Return how many bytes of memory programs may still take."""
    import psutil  # here, for models and retrofits need no more than torch and transformers

    return psutil.virtual_memory().available


__all__ = ["free_memory"]
