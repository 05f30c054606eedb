"""Use a converted model as a user without `attnres` does; run by `test_convert_serving.py`.

serving_session.py FOLDER PROMPT OUT        results go to the file `OUT`
"""

import json
import sys

from transformers import AutoModelForCausalLM, pipeline

folder, prompt, out = sys.argv[1:]
generate = pipeline("text-generation", model=folder, trust_remote_code=True)
seen = {"text": generate(prompt, max_new_tokens=60, do_sample=False)[0]["generated_text"]}
seen["class"] = type(generate.model).__module__
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    seen["untrusted"] = str(error)
with open(out, "w") as file:
    json.dump(seen, file)
