"""Without its extra, the import of a package fails with one line, and only where the package is used."""

import sys

import pytest

from attnres.utils.extras import require_extra

from .. import forks


def test_a_missing_package_is_named_with_its_extra_and_the_install_command():
    with (
        pytest.raises(
            ModuleNotFoundError,
            match=r"the package nowhere_at_all is not installed\. It comes with `attnres\[cpu\]`: pip install 'numba",
        ) as raised,
        require_extra("cpu"),
    ):
        import nowhere_at_all.part  # noqa: F401
    assert raised.value.name == "nowhere_at_all"
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_a_missing_module_of_attnres_keeps_its_error():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'attnres\.nowhere'"), require_extra("cpu"):
        import attnres.nowhere  # noqa: F401


def test_other_errors_of_an_import_are_not_changed(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise ImportError('libbroken.so: cannot open shared object file')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ImportError, match=r"^libbroken\.so") as raised, require_extra("cpu"):
        import broken_package  # noqa: F401
    assert not isinstance(raised.value, ModuleNotFoundError)


# A process in which the packages of the extra `analysis` cannot be imported.
MEASURE_WITHOUT_EXTRA = """
import sys

for name in [name for name in sys.modules if name.startswith(("attnres.analysis", "bokeh", "matplotlib"))]:
    del sys.modules[name]
for name in ("bokeh", "matplotlib"):
    sys.modules[name] = None
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnres.analysis import attention_sinks, depth_attention, depth_mixing, interventions, magnitudes

shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("attnres_llama", **shape, attn_res_block_size=1))
ids = torch.arange(1, 9)[None]
read = depth_attention(model, ids)
for measure in (depth_mixing, magnitudes, attention_sinks, interventions):
    measure(model, ids)
try:
    read.plot()
except ModuleNotFoundError as error:
    print(error)
try:
    from attnres.analysis import write_report
except ModuleNotFoundError as error:
    print(error)
"""


def test_measurements_need_no_extra_and_figures_name_theirs(tmp_path):
    process = forks.run("-c", MEASURE_WITHOUT_EXTRA, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    plot, report = process.stdout.splitlines()
    for line in (plot, report):
        assert line.startswith("the package matplotlib is not installed. It comes with `attnres[analysis]`: pip")


def test_inspect_names_the_missing_extra_before_it_loads_a_model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    start = "import sys; sys.modules['bokeh'] = None; sys.argv = ['attnres', 'inspect', 'model']\n"
    process = forks.run("-c", f"{start}from attnres.commands.main import main; main()", cwd=tmp_path)
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert line.startswith("attnres: the package bokeh is not installed. It comes with `attnres[analysis]`")
