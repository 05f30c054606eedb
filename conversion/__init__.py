"""Retrofit: turn a pretrained standard-residual decoder into an AttnRes model that computes the same function."""

from .retrofit import retrofit

__all__ = ["retrofit"]
