"""Retrofit pretrained decoders, and convert checkpoints.

The main function is [`retrofit`]: it gives a standard decoder other residual connections under which it computes the
same function.
"""

from .retrofit import retrofit

__all__ = ["retrofit"]
