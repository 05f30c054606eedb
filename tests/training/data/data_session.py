"""A process that loads blocks, for tests of the shared cache: `data_session.py FILE TOKENIZER CACHE LOG HOW`.

It writes a line to LOG when it tokenises, and prints a digest of the blocks. With HOW `slow` it tokenises slowly; with
`die` it is killed while it tokenises.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

from transformers import AutoTokenizer

from attnres.training.data.blocks import DataSpec, load_blocks
from attnres.training.data.documents import Encoder


def main(path: str, tokenizer: str, cache: str, log: str, how: str) -> None:
    batches = Encoder.batches

    def logging(self, documents):
        with open(log, "a") as file:
            file.write("tokenised\n")
        for tokens in batches(self, documents):
            yield tokens
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1)

    Encoder.batches = logging
    blocks = load_blocks(DataSpec(path), AutoTokenizer.from_pretrained(tokenizer), 32, seed=5, cache=Path(cache))
    print(hashlib.sha256(blocks[:]["input_ids"].numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
