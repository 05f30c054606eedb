"""Read legacy `pytorch_model.bin` files without running code from them."""

import pickle
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor


def read_pickle(path: Path, dtypes: Collection[torch.dtype]) -> dict[str, Tensor]:
    """Return the tensors of a `pytorch_model.bin` by name, contiguous and mapped into memory.

    Tied tensors share their memory, which safetensors files cannot express. Only the first of their names is returned.

    Args:
        path: The file.
        dtypes: The dtypes that weights may have.

    Returns:
        The tensors.

    Raises:
        OSError: The file is truncated or damaged.
        ValueError: The file runs code when it is loaded, or holds something other than tensors of these dtypes, or its
            tensors would take more than twice its bytes.
    """
    state = _read_state(path, dtypes)
    first = _first_names(state)
    return {name: state[name].contiguous() for name in first.values()}


def read_pickle_shapes(path: Path, dtypes: Collection[torch.dtype]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a `pytorch_model.bin` by name, tied tensors under all their names.

    Args:
        path: The file.
        dtypes: The dtypes that weights may have.

    Returns:
        Name -> dtype and shape.

    Raises:
        OSError: The file is truncated or damaged.
        ValueError: As [`read_pickle`].
    """
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in _read_state(path, dtypes).items()}


def _read_state(path: Path, dtypes: Collection[torch.dtype]) -> dict[str, Tensor]:
    """Return all tensors of a file by name, after the checks that [`read_pickle`] lists."""
    state = _load_pickle(path)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} is not a dictionary of tensors.")
    for name, tensor in state.items():
        if tensor.dtype not in dtypes:
            raise ValueError(f"`{name}` in {path} is {tensor.dtype}, which is not a dtype of weights.")
    # Tensors may repeat or share bytes of the file, and the rewritten file would hold each of them in full.
    total, held = sum(state[name].nbytes for name in _first_names(state).values()), path.stat().st_size
    if total > 2 * held:
        raise ValueError(
            f"{path} has {held:,} bytes, but its tensors would have {total:,}. Use weights in safetensors."
        )
    return state


def _first_names(state: dict[str, Tensor]) -> dict[tuple, str]:
    """Return the first name of each tensor. The key is its address, shape and strides."""
    # In reverse order, the first name replaces the later ones.
    return {(t.data_ptr(), t.shape, t.stride()): name for name, t in reversed(state.items())}


def _load_pickle(path: Path) -> object:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            # Files of PyTorch before 1.6 cannot be mapped into memory.
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle fails in any way
        if isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in str(error):
            message = f"{path} runs code when it is loaded, so it is refused. Use weights in safetensors."
            raise ValueError(message) from error
        reason = str(error).strip() or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is not a pickle"
        raise OSError(f"{path} is truncated or damaged ({reason}). Copy it again.") from error


__all__ = ["read_pickle", "read_pickle_shapes"]
