"""Benchmarks are described, chosen and loaded, and messages name missing or damaged data."""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import datasets
import huggingface_hub.constants
import pandas as pd
import pytest

from attnres.eval import data_folder
from attnres.eval.benchmarks import _cache_path, benchmarks, load, pick, task_path
from attnres.eval.data_folder import loadable

from .models import Oracle, evaluate
from .synthetic import gpqa, write_data_set


def test_the_task_path_holds_the_group():
    assert (task_path() / "attnres_paper.yaml").is_file()


@pytest.mark.slow
def test_describing_the_benchmarks_does_not_import_the_harness():
    code = "import sys; from attnres.eval.benchmarks import pick; pick('paper'); print('lm_eval' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_pick_returns_all_or_the_named_benchmarks_in_the_papers_order():
    assert pick("paper") == list(benchmarks().values())
    assert [benchmark.name for benchmark in pick("gsm8k, mmlu,gsm8k")] == ["mmlu", "gsm8k"]
    assert [benchmark.name for benchmark in benchmarks().values() if benchmark.runs_code] == ["humaneval", "mbpp"]


def test_the_message_on_an_unknown_name_is_one_line_that_lists_the_known_names():
    with pytest.raises(ValueError) as error:
        pick("mmlu,hellaswga")
    message = str(error.value)
    assert "'hellaswga'" in message and "Did you mean `hellaswag`?" in message and "\n" not in message
    assert all(name in message for name in benchmarks())
    with pytest.raises(ValueError, match="--tasks names no benchmark"):
        pick(" , ")


def test_every_task_of_a_benchmark_reads_the_folder(hub, loaded):
    tasks = loaded("mgsm")["tasks"].values()
    assert {task.DATASET_PATH for task in tasks} == {str(hub / "juletxara/mgsm")}
    assert loaded("mgsm")["groups"]["attnres_mgsm"].alias == "MGSM"


def test_a_folder_given_relative_to_the_working_directory_is_read(hub, monkeypatch):
    monkeypatch.chdir(hub.parent)
    assert len(load(benchmarks()["gsm8k"], Path("hub"))["tasks"]) == 1


def test_another_folder_or_changed_files_are_read_again(tmp_path):
    """The cache of `datasets` compares only the README: it would return the data of the first folder three times."""
    benchmark, questions = benchmarks()["gpqa_diamond"], []
    for folder, count in (("one", 6), ("two", 7), ("one", 8)):
        write_data_set(tmp_path / folder / benchmark.dataset, {"gpqa_diamond": {"train": gpqa(count)}}, suffix="csv")
        (task,) = load(benchmark, tmp_path / folder)["tasks"].values()
        questions.append(len(task.eval_docs))
    assert questions == [6, 7, 8]


def copied(hub: Path, folder: Path, name: str) -> Path:
    """Return a copy of a benchmark's data set, to be damaged."""
    dataset = benchmarks()[name].dataset
    return Path(shutil.copytree(hub / dataset, folder / dataset))


def without_train_split(copy: Path) -> None:
    lines = (copy / "README.md").read_text().splitlines()
    train = lines.index("  - split: train")
    (copy / "README.md").write_text("\n".join(lines[:train] + lines[train + 2 :]) + "\n")


def with_another_column(copy: Path) -> None:
    for path in copy.rglob("*.parquet"):
        pd.read_parquet(path).rename(columns={"question": "frage"}).to_parquet(path)


def test_data_behind_links_is_read_and_read_again_once_it_changes(tmp_path):
    data, folder = tmp_path / "elsewhere", tmp_path / "linked"
    (data / "part").mkdir(parents=True)
    folder.mkdir()
    (folder / "part").symlink_to(data / "part")
    (folder / "README.md").symlink_to(data / "README.md")
    (data / "README.md").write_text("---\nlicense: mit\n---\n")
    states = []
    for content in ("one", "other"):
        (data / "part" / "test.csv").write_text(content)
        data_folder.check(folder)
        states.append(_cache_path(folder))
    assert states[0] != states[1]
    assert data_folder.files_of(folder) == [folder / "README.md", folder / "part" / "test.csv"]


def with_readme(*lines: str):
    return lambda copy: (copy / "README.md").write_text("\n".join(["---", *lines, "---", ""]))


def reading(path: str):
    config = ["configs:", "- config_name: main", "  data_files:", "  - split: test"]
    return with_readme(*config, f"    path: {path}")


def with_broken_file(copy: Path) -> None:
    (copy / "main/test.parquet").write_bytes(b"PAR1 broken")


def with_damaged_pages(copy: Path) -> None:
    content = bytearray((copy / "main/test.parquet").read_bytes())
    content[4:4000] = bytes(3996)
    (copy / "main/test.parquet").write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("gsm8k", with_readme("configs: [a", "b: c"), "README.md cannot be read"),
        ("gsm8k", with_readme("configs: 3"), "README.md: `configs` must be a list of configurations, not 3"),
        ("gsm8k", with_readme("configs: [main]"), "README.md: `configs` must be a list"),
        ("gsm8k", with_readme("configs:", "- config_name: 3", "  data_files: 5"), "openai/gsm8k"),
        ("gsm8k", lambda copy: (copy / "README.md").write_bytes(b"---\n\xff\n---\n"), "README.md cannot be read"),
        ("gsm8k", reading("/etc/passwd"), "README.md names /etc/passwd, which is not in the folder"),
        ("gsm8k", reading("../../x/*.parquet"), "README.md names ../../x/*.parquet, which is not in the folder"),
        ("gsm8k", reading("https://example.com/x"), "README.md names https://example.com/x, which is not"),
        ("gsm8k", with_damaged_pages, "An error occurred while generating the dataset"),
        ("gsm8k", shutil.rmtree, "there is no folder"),
        ("triviaqa", without_train_split, "no split or column 'train'"),
        ("gsm8k", with_another_column, "'question' is undefined"),
        ("mgsm", lambda copy: (copy / "README.md").unlink(), "BuilderConfig 'bn' not found"),
        ("mgsm", lambda copy: shutil.rmtree(copy / "te"), "te/train.parquet"),
        (
            "gsm8k",
            lambda copy: (copy / "main/test.parquet").write_bytes(b"PAR1 broken"),
            "An error occurred while generating the dataset",
        ),
    ],
    ids=[
        "yaml",
        "number",
        "names",
        "types",
        "encoding",
        "absolute",
        "parent",
        "url",
        "pages",
        "folder",
        "split",
        "column",
        "configuration",
        "file",
        "content",
    ],
)
def test_the_message_on_damaged_data_is_one_line_with_the_remedy(name, damage, reason, hub, tmp_path):
    copy = copied(hub, tmp_path, name)
    damage(copy)
    benchmark = benchmarks()[name]
    with pytest.raises(FileNotFoundError) as error:
        load(benchmark, tmp_path)
    message = str(error.value)
    assert message.startswith(f"{benchmark.title}: cannot read the data set {benchmark.dataset} in {tmp_path}")
    assert reason in message and "\n" not in message and len(message) < 800
    assert f"`hf download --repo-type dataset {benchmark.dataset} --local-dir {copy}`" in message


SCRIPT = "raise RuntimeError('nothing runs this')"
SUBJECTS = {"agronomy": ("0.50", "None"), "virology": ("12", "")}  # and two choices of the subject's questions


def rows(subject: str) -> pd.DataFrame:
    first, second = SUBJECTS[subject]
    choices = {"A": [first] * 2, "B": [second] * 2, "C": ["c", "丙"], "D": ["d", "丁"], "Answer": ["A", "D"]}
    return pd.DataFrame({"Question": [f"{subject} 1", f"{subject} 2"], **choices})


def as_released(folder: Path) -> None:
    """Write CMMLU as its authors did: a script, and a zip file with a CSV file for each split of each subject."""
    folder.mkdir(parents=True)
    (folder / "cmmlu.py").write_text(SCRIPT)
    (folder / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n# CMMLU\n")
    with zipfile.ZipFile(folder / "cmmlu_v1_0_1.zip", "w") as archive:
        for subject in SUBJECTS:
            for split in ("dev", "test"):
                archive.writestr(f"{split}/{subject}.csv", rows(subject).to_csv())  # the first column has no name


def as_converted(folder: Path) -> None:
    """Write CMMLU as in the Hub's branch `refs/convert/parquet`, without a README."""
    for subject in SUBJECTS:
        for split in ("dev", "test"):
            (folder / subject / split).mkdir(parents=True)
            rows(subject).to_parquet(folder / subject / split / "0000.parquet")


def as_converted_beside_the_script(folder: Path) -> None:
    as_converted(folder)
    (folder / "cmmlu.py").write_text(SCRIPT)
    (folder / "README.md").write_text("# CMMLU\n")


def as_listed_beside_the_script(folder: Path) -> None:
    splits = {split: rows("agronomy").to_dict("records") for split in ("dev", "test")}
    write_data_set(folder, {"agronomy": splits, "virology": splits})
    (folder / "cmmlu.py").write_text(SCRIPT)


@pytest.mark.parametrize(
    "write", [as_released, as_converted, as_converted_beside_the_script, as_listed_beside_the_script]
)
def test_a_data_set_with_a_loading_script_is_read_without_it(write, tmp_path):
    folder = tmp_path / "haonan-li" / "cmmlu"
    write(folder)
    for _ in range(2):  # the second time from the cache
        path = loadable(folder, tmp_path / "cache")
        data = datasets.load_dataset(path, "agronomy", cache_dir=str(tmp_path / "cache"))
        assert {split: data[split].to_pandas().to_dict("list") for split in data} == dict.fromkeys(
            ("dev", "test"), rows("agronomy").to_dict("list")
        )
    assert sorted(datasets.get_dataset_config_names(path)) == [*SUBJECTS]


def test_folders_of_splits_are_left_to_datasets(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "set" / split / "en").mkdir(parents=True)
        rows("agronomy").to_parquet(tmp_path / "set" / split / "en" / "0000.parquet")
    path = loadable(tmp_path / "set", tmp_path / "cache")
    assert {*datasets.load_dataset(path, cache_dir=str(tmp_path / "cache"))} == {"train", "test"}


def test_a_script_whose_data_cannot_be_read_without_it_is_refused_with_the_remedy(tmp_path, monkeypatch):
    benchmark, folder = benchmarks()["cmmlu"], tmp_path / "haonan-li" / "cmmlu"
    folder.mkdir(parents=True)
    (folder / "cmmlu.py").write_text(SCRIPT)
    with pytest.raises(FileNotFoundError, match=r"found cmmlu\.py") as error:
        load(benchmark, tmp_path)
    assert f"haonan-li/cmmlu --revision refs/convert/parquet --local-dir {folder}`" in str(error.value)
    (folder / "data.zip").write_bytes(b"PK broken")
    with pytest.raises(FileNotFoundError, match=r"data\.zip is damaged"):
        load(benchmark, tmp_path)
    with zipfile.ZipFile(folder / "data.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("dev/agronomy.csv", rows("agronomy").to_csv())
        start = archive.start_dir - 20
    content = bytearray((folder / "data.zip").read_bytes())
    content[start : start + 10] = b"\xff" * 10
    (folder / "data.zip").write_bytes(content)
    with pytest.raises(FileNotFoundError, match=r"data\.zip is damaged"):
        load(benchmark, tmp_path)


def test_a_data_set_with_a_loading_script_is_downloaded_from_the_hub_whole(tmp_path, monkeypatch):
    # In this folder, `datasets` takes the id of the task file for a folder with a script, and refuses it as on the Hub.
    monkeypatch.chdir(tmp_path)
    as_released(Path("haonan-li/cmmlu"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    is_online = True

    def download(repository, repo_type, local_dir):
        if not is_online and not Path(local_dir).is_dir():
            raise ConnectionError("offline")
        shutil.copytree(repository, local_dir, dirs_exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    benchmark = replace(benchmarks()["cmmlu"], group="cmmlu_agronomy")
    for is_online in (True, False):  # noqa: B007 (read by `download`)
        (task,) = load(benchmark)["tasks"].values()
        assert [doc["Question"] for doc in task.test_docs()] == ["agronomy 1", "agronomy 2"]
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match="CMMLU: cannot read the data set haonan-li/cmmlu on the Hub: offline"):
        load(benchmark)


def test_the_remedy_for_a_gated_data_set_says_to_accept_its_terms(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"accept the terms at https://huggingface\.co/datasets/Idavidrein/gpqa"
    ):
        load(benchmarks()["gpqa_diamond"], tmp_path)


@pytest.mark.slow
def test_without_a_network_the_message_on_hub_data_is_one_line(tmp_path):
    code = "from attnres.eval.benchmarks import *\nfor name in ('gsm8k', 'gpqa_diamond'):\n"
    code += "    try: load(benchmarks()[name])\n    except FileNotFoundError as error: print(error)"
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, timeout=120)
    gsm8k, gpqa_diamond = done.stdout.splitlines()
    assert gsm8k.startswith("GSM8K: cannot read the data set openai/gsm8k on the Hub")
    assert "go online" in gsm8k and "give `--data DATA`" in gsm8k
    assert "accept the terms" in gpqa_diamond and "hf auth login" in gpqa_diamond


def test_only_the_first_data_set_waits_for_a_missing_network(monkeypatch):
    """Each attempt would take half a minute."""
    tries = []

    def load_dataset(path, **options):
        tries.append(path)
        raise ConnectionError(f"Couldn't reach {path}, offline: {datasets.config.HF_HUB_OFFLINE}")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name, offline in (("gsm8k", False), ("triviaqa", True)):
        with pytest.raises(FileNotFoundError, match=f"offline: {offline}"):
            load(benchmarks()[name])
    assert tries == ["openai/gsm8k", "mandarjoshi/trivia_qa"]


def test_loading_shows_no_progress_bars_and_enables_them_again(hub, tmp_path, capfd):
    import datasets

    copied(hub, tmp_path, "gsm8k")
    load(benchmarks()["gsm8k"], tmp_path)
    assert "examples/s" not in capfd.readouterr().err
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize("name", ["gpqa_diamond", "humaneval"])
def test_data_in_the_hubs_layout_is_read_and_scored(name, loaded):
    benchmark = benchmarks()[name]
    assert evaluate(Oracle(benchmark), benchmark, loaded(name))["headline"] == 1.0


def test_the_order_of_gpqas_choices_depends_on_the_question_alone(loaded, tmp_path):
    (task,) = loaded("gpqa_diamond")["tasks"].values()
    answers = [doc["answer"] for doc in task.eval_docs]
    assert len(set(answers)) > 1
    again = [doc["answer"] for doc in task.eval_docs]  # the stock task would give another order
    benchmark = benchmarks()["gpqa_diamond"]
    write_data_set(tmp_path / benchmark.dataset, {"gpqa_diamond": {"train": gpqa()[::-1]}}, suffix="csv")
    (reversed_task,) = load(benchmark, tmp_path)["tasks"].values()
    assert answers == again == [doc["answer"] for doc in reversed_task.eval_docs][::-1]
    for doc in task.eval_docs:
        places = [doc["choice1"], doc["choice2"], doc["choice3"], doc["choice4"]]
        assert sorted(places) == sorted([doc["Correct Answer"], *(doc[f"Incorrect Answer {n}"] for n in (1, 2, 3))])
        assert places["ABCD".index(doc["answer"][1])] == doc["Correct Answer"]
