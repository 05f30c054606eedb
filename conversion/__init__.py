"""Retrofit: give a pretrained standard decoder other residual connections; it computes the same function."""

from .retrofit import retrofit

__all__ = ["retrofit"]
