"""What a model does across its depth: measured depth attention, depth-mixing matrices, and figures of them."""

from .depth_attention import depth_attention_map
from .mixing import TokenMixing, mixing_matrix, semiseparable_rank, token_mixing

__all__ = ["TokenMixing", "depth_attention_map", "mixing_matrix", "semiseparable_rank", "token_mixing"]
