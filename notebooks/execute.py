"""Run the notebooks from top to bottom, each with a fresh kernel in an empty directory.

    python notebooks/execute.py [NAME ...]           run these, such as `quickstart`; by default all
    python notebooks/execute.py --save [NAME ...]    run these and store their outputs

If `ATTNRES_ASSETS` names a folder with the checkpoint stories260K and the TinyStories text, the notebooks get them in
`ATTNRES_CHECKPOINT` and `ATTNRES_TEXT`, unless you set these variables yourself. The stored outputs come from them.
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
    "PYTHONWARNINGS": "ignore",  # for example the warning that progress bars have no widgets
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}
# The progress line of a `Trainer`. It shows the time taken, which differs between runs.
PROGRESS = re.compile(r"\[(\d+/\d+) [\d:]+, Epoch [\d./]+\]")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class NotebookError(Exception):
    """A notebook that did not run to its end. The message names the notebook, the cell and the reason."""


def execute(path: Path, timeout: float = 180.0) -> NotebookNode:
    """Run a notebook without changing its file.

    Args:
        path: the notebook.
        timeout: seconds that all its cells may take together.

    Returns:
        The notebook with its outputs.

    Raises:
        NotebookError: a cell raised an error, the time ran out, or the kernel died.
    """
    notebook = nbformat.read(path, as_version=4)
    deadline = time.monotonic() + timeout
    cell_number = 0

    def seconds_left(cell: NotebookNode) -> float:
        return max(1.0, deadline - time.monotonic())

    def on_cell_start(cell: NotebookNode, cell_index: int) -> None:
        nonlocal cell_number
        cell_number = cell_index + 1

    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout_func=seconds_left,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            on_cell_start=on_cell_start,
            coalesce_streams=True,
            extra_arguments=["--log-level=CRITICAL"],
        )
        try:
            client.execute(env=os.environ | QUIET | _real_data(Path(folder)))
        except CellTimeoutError:
            raise NotebookError(f"{path.name}, cell {cell_number}: not done after {timeout:.0f} seconds.") from None
        except CellExecutionError as error:
            raise NotebookError(f"{path.name}, cell {cell_number}: {error.ename}: {error.evalue}") from None
        except DeadKernelError:
            raise NotebookError(f"{path.name}, cell {cell_number}: the kernel died.") from None
    return notebook


def _real_data(folder: Path) -> dict[str, str]:
    """Return the variables that give notebooks the real checkpoint and text, as links in `folder`."""
    assets = os.environ.get("ATTNRES_ASSETS")
    if not assets or ASSETS.keys() <= os.environ.keys():
        return {}
    # Links with short names, so that no stored output shows a path of this machine.
    for place in ASSETS.values():
        (folder / Path(place).name).symlink_to(Path(assets).absolute() / place)
    return {variable: Path(place).name for variable, place in ASSETS.items()}


def without_noise(notebook: NotebookNode) -> NotebookNode:
    """Remove times and metadata, which differ between runs, and make figures small. Changes and returns `notebook`."""
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
    """Reduce a PNG picture in base64 to 256 colours."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    content = io.BytesIO()
    image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(content, "PNG", optimize=True)
    return base64.b64encode(content.getvalue()).decode()


def main() -> None:
    """Run from the command line."""
    names = sorted(path.stem for path in HERE.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description="Run the notebooks from top to bottom.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)} (default: all)")
    parser.add_argument("--save", action="store_true", help="store the outputs in the notebooks")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for each (default: 180)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"there is no notebook {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    for name in arguments.names or names:
        path, start = HERE / f"{name}.ipynb", time.monotonic()
        try:
            notebook = execute(path, arguments.timeout)
        except NotebookError as error:
            sys.exit(str(error))
        if arguments.save:
            atomic_write(path, nbformat.writes(without_noise(notebook)) + "\n")
        print(f"{path.name}: {time.monotonic() - start:.0f} s{', saved' if arguments.save else ''}", flush=True)


if __name__ == "__main__":
    main()
