"""The table of how connections start and run names those that tests run on several processes."""

import importlib

from ..training.parallel import pipeline_session, test_sequence_parallel
from .reading import ROOT


def test_the_table_names_the_connections_that_tests_run_on_several_processes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    facts = importlib.import_module("connection_facts")
    in_pipelines = [case["fields"] for case in pipeline_session.CASES.values()]
    with_sequences = [changes for _, changes in test_sequence_parallel.MODELS.values()]
    for stated, fields in ((facts.PIPELINES, in_pipelines), (facts.SEQUENCES, with_sequences)):
        assert stated == {some.get("residual_connection", "attn_res") for some in fields}
