"""Score HumanEval and MBPP: run each completion as a program in the sandbox, against the tests of its task.

The task files name these functions as `process_results`. lm_eval calls them only if you allowed running generated code.
"""

import ast
import builtins
import re
import sys
import warnings

from attnres.eval import sandbox

# A Markdown fence, closed or not.
_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Code, as opposed to an introduction: an indented first line, or a line that begins with a keyword of a definition.
_CODE = re.compile(r"\A\s*?^[ \t]{2,}\S|^(?:(?:def|class|import) |from \S+ import |@)", re.MULTILINE)


def humaneval(doc: dict, results: list) -> dict[str, float]:
    """Score pass@1 of one completion of HumanEval: 1.0 if `check(entry_point)` of the task passes.

    The program is the prompt followed by the completion, which may be the rest of the function or the whole function
    again. Helper functions in the prompt, which some tests call, run outside of the program, which cannot replace them.

    Args:
        doc: The item, with `prompt`, `test` and `entry_point`.
        results: The one completion, as lm_eval hands it over.
    """
    name, completion = doc["entry_point"], strip_fences(_only(results))
    # Some tokenizers drop a leading space. Three spaces cannot follow the prompt, which indents by four.
    if re.match(r" {3}\S", completion):
        completion = f" {completion}"
    program = doc["prompt"] + completion
    tests = f"{doc['test']}\ncheck({name})"
    return _score(sandbox.run(program, tests, names=[name], helpers=doc["prompt"]))


def mbpp(doc: dict, results: list) -> dict[str, float]:
    """Score pass@1 of one completion of MBPP: 1.0 if all statements of `test_list` hold.

    The program is the completion up to `[DONE]`, without its code fence. The set-up code of the task runs after it. Two
    tasks of the data set need that, since their tests build trees of nodes that the program defines.

    Args:
        doc: The item, with `test_list`, `code` and `test_setup_code`.
        results: The one completion, as lm_eval hands it over.
    """
    program = strip_fences(_only(results).split("[DONE]")[0].lstrip().removeprefix("[BEGIN]")).lstrip()
    tests = "\n".join(doc["test_list"])
    names, modules = tested_names(tests, doc.get("code", ""))
    setup = doc.get("test_setup_code") or ""
    return _score(sandbox.run(program, tests, names=names, modules=modules, setup=setup))


def strip_fences(completion: str) -> str:
    """Return the code in the first Markdown fence, or the text before it, if that is code or no fence opens."""
    before = completion.split("```")[0]
    fenced = _FENCED.search(completion)
    return fenced[1] if fenced and not _CODE.search(before) else before


def tested_names(tests: str, reference: str) -> tuple[list[str], list[str]]:
    """Return the names in `tests` that the program must define, and the modules that it must import.

    A built-in name, or a module of the standard library, must come from the program only if the reference solution
    defines it too. So a program cannot replace `len` or `math` in the tests.

    Args:
        tests: The source of the tests.
        reference: The source of the reference solution.

    Returns:
        Sorted names and sorted modules.
    """
    nodes = [node for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)]
    read = {node.id for node in nodes if isinstance(node.ctx, ast.Load)}
    assigned = {node.id for node in nodes if not isinstance(node.ctx, ast.Load)}
    provided = {*dir(builtins), *sys.stdlib_module_names} - _definitions(reference)
    names = read - assigned
    return sorted(names - provided), sorted(names & provided & sys.stdlib_module_names)


def _definitions(source: str) -> set[str]:
    """Return the functions and classes that a source defines at its top level."""
    try:
        with warnings.catch_warnings(action="ignore"):  # on regular expressions that are not raw strings
            body = ast.parse(source).body
    except SyntaxError:
        return set()
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def _only(results: list) -> str:
    """Return the one completion in `[text]`, or in `[[text]]`, as lm_eval passes it where a task has no filter."""
    while isinstance(results, list):
        if len(results) != 1:
            raise ValueError(f"pass@1 needs one completion per task, got {len(results)}: set `repeats: 1`")
        (results,) = results
    return results


def _score(outcome: sandbox.Outcome) -> dict[str, float]:
    return {"pass@1": float(outcome.passed)}
