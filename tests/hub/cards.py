"""What the Hub reads in a repository: the metadata of the model card, and results under `.eval_results/`."""

import re
from fnmatch import fnmatch

RELATIONS = ("adapter", "merge", "quantized", "finetune")
LICENSES = (
    "afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsl-1.0 "
    "cc cc-by-2.0 cc-by-3.0 cc-by-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 "
    "cdla-permissive-2.0 creativeml-openrail-m ecl-2.0 epl-2.0 eupl-1.2 gemma gfdl gpl gpl-2.0 gpl-3.0 "
    "isc lgpl lgpl-2.1 lgpl-3.0 llama2 llama3 llama3.1 llama3.2 llama3.3 mit mpl-2.0 ms-pl ncsa odc-by "
    "odbl ofl-1.1 openrail openrail++ osl-3.0 postgresql unknown unlicense other wtfpl zlib"
)
LISTS = ("tags", "datasets", "language", "metrics", "base_model")


def front_matter(content: str) -> object:
    """What stands between the first two lines `---`; None if nothing does.

    Raises:
        ValueError: if it is not YAML.
    """
    import yaml  # only here: the server is to start quickly

    match = re.match(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*$", content, re.DOTALL | re.MULTILINE)
    try:
        return yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def check(content: str, kind: str) -> tuple[list[str], list[str]]:
    """Errors and warnings about the front matter of a `README.md`, as `/api/validate-yaml` tells them."""
    try:
        data = front_matter(content)
    except ValueError as error:
        return [f"YAML metadata is invalid: {error}"], []
    if data is None:
        return [], ["empty or missing yaml metadata in repo card"]
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
    return [value] if isinstance(value, str) else [item for item in value or [] if isinstance(item, str)]


def result_error(entry: object) -> str | None:
    """What is wrong with an entry of `.eval_results/*.yaml`."""
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


def results(files: dict[str, bytes]) -> list[dict]:
    """The entries under `.eval_results/`, each as `data`, or with the `error` that keeps its file from being shown."""
    found = []
    for path, content in sorted(files.items()):
        if not fnmatch(path, ".eval_results/*.yaml"):
            continue
        import yaml

        try:
            entries = yaml.safe_load(content)
        except yaml.YAMLError as error:
            found.append({"filename": path, "error": str(error)})
            continue
        if not isinstance(entries, list):
            found.append({"filename": path, "error": "the file must hold an array"})
            continue
        for entry in entries:
            error = result_error(entry)
            found.append({"filename": path} | ({"error": error} if error else {"data": entry}))
    return found


def facts(files: dict[str, bytes]) -> dict:
    """What the information on a model takes from its files."""
    found = {}
    if "README.md" in files and not check(files["README.md"].decode(), "model")[0]:
        data = front_matter(files["README.md"].decode())
        if data is not None:
            found["cardData"] = data
            found["tags"] = strings(data.get("tags"))
            found |= {key: data[key] for key in ("library_name", "pipeline_tag") if key in data}
    if entries := results(files):
        found["evalResults"] = entries
    return found
