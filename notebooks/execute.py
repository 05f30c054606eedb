"""Run the notebooks from top to bottom, each by a fresh kernel in an empty directory.

    python notebooks/execute.py [NAME ...]           which ones, such as `quickstart`; by default all
    python notebooks/execute.py --save [NAME ...]    and store what they put out

Where `ATTNRES_ASSETS` names a folder with the checkpoint stories260K and the TinyStories text, `ATTNRES_CHECKPOINT` and
`ATTNRES_TEXT` name these to the notebooks, unless they are set already. The stored outputs are of these.
"""

import argparse
import base64
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from PIL import Image

from attnres.utils.files import atomic_write

HERE = Path(__file__).parent
ASSETS = {"ATTNRES_CHECKPOINT": "checkpoints/stories260K-hf", "ATTNRES_TEXT": "corpora/tinystories/train.txt"}
QUIET = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONWARNINGS": "ignore",  # such as that there are no widgets for progress bars
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}
PROGRESS = re.compile(r"\[(\d+/\d+) [\d:]+, Epoch [\d./]+\]")  # of a `Trainer`, with the time that it took
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class Failure(Exception):
    """A notebook did not run to its end: which one, in which cell, and why."""


def execute(path: Path, timeout: float = 180.0) -> NotebookNode:
    """Run a notebook and return it with its outputs; the file stays as it is.

    Args:
        timeout: seconds, of all its cells together.

    Raises:
        Failure: a cell raised an error, or the time was over.
    """
    notebook = nbformat.read(path, as_version=4)
    ends = time.monotonic() + timeout
    running = [0]

    def left(cell: NotebookNode) -> float:
        return max(1.0, ends - time.monotonic())

    def on_cell_start(cell: NotebookNode, cell_index: int) -> None:
        running[0] = cell_index + 1

    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout_func=left,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            on_cell_start=on_cell_start,
            coalesce_streams=True,
            extra_arguments=["--log-level=CRITICAL"],
        )
        try:
            client.execute(env=os.environ | QUIET | _real_data(Path(folder)))
        except CellTimeoutError:
            raise Failure(f"{path.name}, cell {running[0]}: not done after {timeout:.0f} seconds.") from None
        except CellExecutionError as error:
            raise Failure(f"{path.name}, cell {running[0]}: {error.ename}: {error.evalue}") from None
        except DeadKernelError:
            raise Failure(f"{path.name}, cell {running[0]}: the kernel died.") from None
    return notebook


def _real_data(folder: Path) -> dict[str, str]:
    """The variables for the notebooks that take a checkpoint. They name links, so that no output shows a path."""
    assets = os.environ.get("ATTNRES_ASSETS")
    if not assets or ASSETS.keys() <= os.environ.keys():
        return {}
    for place in ASSETS.values():
        (folder / Path(place).name).symlink_to(Path(assets).absolute() / place)
    return {variable: Path(place).name for variable, place in ASSETS.items()}


def without_noise(notebook: NotebookNode) -> NotebookNode:
    """Strip what differs between runs, such as times, and make figures small."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = _small(data["image/png"])
            if "text/html" in data:
                data["text/html"] = PROGRESS.sub(r"[\1]", data["text/html"])
    return notebook


def _small(png: str) -> str:
    """A picture, in base64, with 256 colours."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    content = io.BytesIO()
    image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(content, "PNG", optimize=True)
    return base64.b64encode(content.getvalue()).decode()


def main() -> None:
    names = sorted(path.stem for path in HERE.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description="Run the notebooks from top to bottom.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--save", action="store_true", help="store the outputs in the notebooks")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for each (default: 180)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"there is no notebook {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    for name in arguments.names or names:
        path, began = HERE / f"{name}.ipynb", time.monotonic()
        try:
            notebook = execute(path, arguments.timeout)
        except Failure as failure:
            sys.exit(str(failure))
        if arguments.save:
            atomic_write(path, nbformat.writes(without_noise(notebook)) + "\n")
        print(f"{path.name}: {time.monotonic() - began:.0f} s{', saved' if arguments.save else ''}", flush=True)


if __name__ == "__main__":
    main()
