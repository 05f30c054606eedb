"""Scorers of HumanEval and MBPP: one completion is one program, run in the sandbox against the tests of its task.

The task files name these functions as `process_results`; lm_eval calls them only if running generated code was allowed.
"""

import ast
import builtins
import re
import sys
import warnings

from attnres.eval import sandbox

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_CODE = re.compile(r"\A\s*?^[ \t]{2,}\S|^(?:(?:def|class|import) |from \S+ import |@)", re.MULTILINE)


def humaneval(doc: dict, results: list) -> dict[str, float]:
    """pass@1 of one completion: 1.0 if `check(entry_point)` of the task passes.

    The program is the prompt followed by the completion, which may be the rest of the function or the function once
    more. The prompt's own helpers, which some tests call, are the prompt's: the program cannot replace them.
    """
    name, completion = doc["entry_point"], strip_fences(_only(results))
    if re.match(r" {3}\S", completion):  # some tokenizers drop a leading space; three cannot follow the prompt's four
        completion = f" {completion}"
    program = doc["prompt"] + completion
    tests = f"{doc['test']}\ncheck({name})"
    return _score(sandbox.run(program, tests, names=[name], helpers=doc["prompt"]))


def mbpp(doc: dict, results: list) -> dict[str, float]:
    """pass@1 of one completion: 1.0 if all statements of `test_list` hold.

    The program is the completion up to `[DONE]`, out of its code fence if it has one. The set-up code of the task, if
    any, runs after it (two tasks of the data set build trees of the program's own nodes; without it no program passes).
    """
    program = strip_fences(_only(results).split("[DONE]")[0].lstrip().removeprefix("[BEGIN]")).lstrip()
    tests = "\n".join(doc["test_list"])
    names, modules = tested_names(tests, doc.get("code", ""))
    setup = doc.get("test_setup_code") or ""
    return _score(sandbox.run(program, tests, names=names, modules=modules, setup=setup))


def strip_fences(completion: str) -> str:
    """The code in the first Markdown fence; what stands before it, if that is code or if the fence only closes."""
    before = completion.split("```")[0]
    fenced = _FENCED.search(completion)
    return fenced[1] if fenced and not _CODE.search(before) else before


def tested_names(tests: str, reference: str) -> tuple[list[str], list[str]]:
    """The names that `tests` read and that are the program's to define; the modules that it is to import.

    A built-in name or one of the standard library's modules is the program's to define only if the reference solution
    defines it: a program brings no `len` and no `math` of its own to the tests.
    """
    nodes = [node for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)]
    read = {node.id for node in nodes if isinstance(node.ctx, ast.Load)}
    own = {node.id for node in nodes if not isinstance(node.ctx, ast.Load)}
    given = {*dir(builtins), *sys.stdlib_module_names} - _defined(reference)
    return sorted(read - own - given), sorted((read - own) & given & sys.stdlib_module_names)


def _defined(source: str) -> set[str]:
    try:
        with warnings.catch_warnings(action="ignore"):  # of regular expressions that are no raw strings
            body = ast.parse(source).body
    except SyntaxError:
        return set()
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def _only(results: list) -> str:
    """The one completion in what lm_eval hands over: `[text]`, or `[[text]]` where no filter has taken the first."""
    while isinstance(results, list):
        if len(results) != 1:
            raise ValueError(f"pass@1 needs one completion per task, got {len(results)}: set `repeats: 1`")
        (results,) = results
    return results


def _score(outcome: sandbox.Outcome) -> dict[str, float]:
    return {"pass@1": float(outcome.passed)}
