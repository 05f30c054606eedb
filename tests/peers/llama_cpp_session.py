"""Logits and greedy tokens of GGUF files by llama.cpp, through its C interface; run by `test_llama_cpp.py`.

llama_cpp_session.py PROMPTS NEW_TOKENS GGUF ... OUT

The file `OUT` gets a list: for each GGUF file, for each prompt, `logits`, the bytes of float32 `[seq, vocab]` in
base64, and `tokens`, those that greedy decoding adds.
"""

import base64
import ctypes
import json
import struct
import sys
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_void_p
from importlib.util import find_spec
from pathlib import Path

# The library's structs of parameters change from release to release. They are taken as bytes, with the library's
# defaults; those changed here are checked to have the default that is expected in their place.
_GGML_F32, _GGML_F16 = 0, 1
_MAX_TOKENS = 512


class _Bytes(Structure):
    """A struct of parameters, with room for a longer one: it travels by value, but in memory."""

    _fields_ = (("content", ctypes.c_ubyte * 1024),)

    def change(self, offset: int, default: int, value: int) -> None:
        (found,) = struct.unpack_from("<i", self.content, offset)
        assert found == default, f"expected {default} at byte {offset} of the parameters, got {found}"
        struct.pack_into("<i", self.content, offset, value)


class _Batch(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


# Name -> type of the result and types of the arguments.
_FUNCTIONS = {
    "llama_backend_init": (None,),
    "llama_model_default_params": (_Bytes,),
    "llama_context_default_params": (_Bytes,),
    "llama_model_load_from_file": (c_void_p, c_char_p, _Bytes),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_model_free": (None, c_void_p),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_init_from_model": (c_void_p, c_void_p, _Bytes),
    "llama_free": (None, c_void_p),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_clear": (None, c_void_p, c_bool),
    "llama_batch_init": (_Batch, c_int32, c_int32, c_int32),
    "llama_batch_free": (None, _Batch),
    "llama_decode": (c_int32, c_void_p, _Batch),
    "llama_get_logits_ith": (POINTER(c_float), c_void_p, c_int32),
}


def load_library() -> ctypes.CDLL:
    """Load llama.cpp from the extension module of `xllamacpp`, which exports its C interface."""
    (folder,) = find_spec("xllamacpp").submodule_search_locations
    (file,) = Path(folder).glob("xllamacpp*.so")
    library = ctypes.CDLL(str(file))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_backend_init()
    return library


class Model:
    """A GGUF file in memory, with a context for one sequence."""

    def __init__(self, library: ctypes.CDLL, path: str):
        self.library = library
        self.model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
        assert self.model, f"llama.cpp cannot load {path}"
        self.vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        parameters = library.llama_context_default_params()
        parameters.change(offset=0, default=512, value=_MAX_TOKENS)  # n_ctx
        parameters.change(offset=28, default=4, value=1)  # n_threads
        parameters.change(offset=32, default=4, value=1)  # n_threads_batch
        parameters.change(offset=52, default=-1, value=0)  # flash_attn_type: it would compute in float16
        parameters.change(offset=104, default=_GGML_F16, value=_GGML_F32)  # type_k
        parameters.change(offset=108, default=_GGML_F16, value=_GGML_F32)  # type_v
        self.context = library.llama_init_from_model(self.model, parameters)
        assert self.context, f"llama.cpp makes no context for {path}"
        self.batch = library.llama_batch_init(_MAX_TOKENS, 0, 1)

    def restart(self) -> None:
        """Forget the sequence."""
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        self.position = 0

    def logits(self, token_ids: list[int]) -> list[bytes]:
        """Continue the sequence by some tokens: the logits after each, as bytes of float32."""
        for i, token_id in enumerate(token_ids):
            self.batch.token[i], self.batch.pos[i] = token_id, self.position + i
            self.batch.n_seq_id[i], self.batch.seq_id[i][0], self.batch.logits[i] = 1, 0, 1
        self.batch.n_tokens = len(token_ids)
        status = self.library.llama_decode(self.context, self.batch)
        assert status == 0, f"llama_decode returned {status}"
        self.position += len(token_ids)
        rows = (self.library.llama_get_logits_ith(self.context, i) for i in range(len(token_ids)))
        return [ctypes.string_at(row, 4 * self.vocab_size) for row in rows]

    def run(self, token_ids: list[int], new_tokens: int) -> dict[str, str | list[int]]:
        """Compute the logits of a prompt, and continue it."""
        self.restart()
        rows = self.logits(token_ids)
        last, tokens = rows[-1], []
        while len(tokens) < new_tokens:
            values = struct.unpack(f"<{self.vocab_size}f", last)
            tokens.append(max(range(self.vocab_size), key=values.__getitem__))
            (last,) = self.logits(tokens[-1:])
        return {"logits": base64.b64encode(b"".join(rows)).decode(), "tokens": tokens}

    def close(self) -> None:
        """Free the memory."""
        self.library.llama_batch_free(self.batch)
        self.library.llama_free(self.context)
        self.library.llama_model_free(self.model)


def main(prompts_file: str, new_tokens: str, *paths: str) -> None:
    """Run the prompts through each GGUF file."""
    *files, out = paths
    prompts, library, results = json.loads(Path(prompts_file).read_text()), load_library(), []
    for path in files:
        model = Model(library, path)
        results.append([model.run(prompt, int(new_tokens)) for prompt in prompts])
        model.close()
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
