"""Use a result's tokenizer without `attnres`; `test_tools.py` runs this and checks the results.

tokenizer_session.py MODEL TEXT OUT        writes token ids to the file `OUT`
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

model, text, out = sys.argv[1:]
print("PreTrainedTokenizerFast", flush=True)
seen = {"by class": PreTrainedTokenizerFast.from_pretrained(model)(text).input_ids}
print("AutoTokenizer", flush=True)
seen["by auto class"] = AutoTokenizer.from_pretrained(model, trust_remote_code=False)(text).input_ids
Path(out).write_text(json.dumps(seen))
