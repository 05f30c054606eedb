"""What Python files import, for the tests of packages and of what travels with weights."""

import ast


def imports_of(text: str) -> set[str]:
    """All modules that a file with this text imports, wherever in it; relative ones with their dots."""
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return modules
