"""Look up the architecture of a configuration in `transformers`, before a model is made; run by `test_tools.py`.

architectures_session.py OUT        writes the names of the found classes to the file `OUT`
"""

import json
import sys
from pathlib import Path

import transformers

imported_first = transformers

import attnres  # noqa: E402, F401

transformers.AutoConfig.for_model("attnres_mistral")

modules = imported_first, sys.modules["transformers"]
Path(sys.argv[1]).write_text(json.dumps([module.AttnResMistralForCausalLM.__name__ for module in modules]))
