"""Check the metadata of a model card, and results under `.eval_results/`, as the Hub does."""

import re

import yaml

RELATIONS = ("adapter", "merge", "quantized", "finetune")
LICENSES = (
    "afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsl-1.0 "
    "cc cc-by-2.0 cc-by-3.0 cc-by-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 "
    "cdla-permissive-2.0 creativeml-openrail-m ecl-2.0 epl-2.0 eupl-1.2 gemma gfdl gpl gpl-2.0 gpl-3.0 "
    "isc lgpl lgpl-2.1 lgpl-3.0 llama2 llama3 llama3.1 llama3.2 llama3.3 mit mpl-2.0 ms-pl ncsa odc-by "
    "odbl ofl-1.1 openrail openrail++ osl-3.0 postgresql unknown unlicense other wtfpl zlib"
)
LISTS = ("tags", "datasets", "language", "metrics", "base_model")


def errors_of_card(content: str) -> tuple[list[str], list[str]]:
    """Return errors and warnings about the front matter of a `README.md`, as `/api/validate-yaml` does."""
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*$", content, re.DOTALL | re.MULTILINE)
    if match is None:
        return [], ["empty or missing yaml metadata in repo card"]
    try:
        data = yaml.safe_load(match[1])
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        return [f"YAML metadata is invalid: {error}"], []
    if not isinstance(data, dict):
        return ["YAML metadata must be an object"], []
    errors = []
    license_ = data.get("license")
    if license_ is not None and set(strings(license_)) - set(LICENSES.split()):
        errors.append(f'"license" must be one of {LICENSES.split()}, not {license_!r}')
    if license_ == "other" and not data.get("license_name"):
        errors.append('"license_name" is required when "license" is "other"')
    relation = data.get("base_model_relation")
    if relation is not None and relation not in RELATIONS:
        errors.append(f'"base_model_relation" must be one of {list(RELATIONS)}, not {relation!r}')
    for key in LISTS:
        value = data.get(key, [])
        if not all(isinstance(item, str) for item in (value if isinstance(value, list) else [value])):
            errors.append(f'"{key}" must be a string or an array of strings, not {value!r}')
    for name in strings(data.get("base_model")):
        if not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w.-]+", name):
            errors.append(f'"base_model" with value "{name}" is not valid. Use a model id from https://hf.co/models.')
    if "model-index" in data and not isinstance(data["model-index"], list):
        errors.append('"model-index" must be an array')
    return errors, []


def strings(value: object) -> list[str]:
    """Return the strings in a value, which may be a string, a list or anything else."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, str)]


def result_error(entry: object) -> str | None:
    """Return the error in an entry of `.eval_results/*.yaml`, or None."""
    if not isinstance(entry, dict):
        return "an entry must be an object"
    dataset = entry.get("dataset")
    if not isinstance(dataset, dict) or not all(isinstance(dataset.get(key), str) for key in ("id", "task_id")):
        return '"dataset" must be an object with "id" and "task_id"'
    if "/" not in dataset["id"]:
        return f'"dataset.id" must be the id of a dataset on the Hub, not {dataset["id"]!r}'
    if isinstance(entry.get("value"), bool) or not isinstance(entry.get("value"), (int, float)):
        return '"value" must be a number'
    source = entry.get("source", {})
    if not isinstance(source, dict) or (source and not str(source.get("url", "")).startswith("http")):
        return '"source" must be an object with "url"'
    unknown = set(entry) - {"dataset", "value", "verifyToken", "date", "source", "notes"}
    return f"unknown keys: {sorted(unknown)}" if unknown else None
