"""Read from source text what classes declare: names, fields and options, without importing the classes.

The files that declare them import PyTorch, which takes seconds. The command line and recipes refuse a misspelt name
before that.
"""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

_DECLARES = re.compile(r"field_defaults|ResidualConnection|^    name = ", re.MULTILINE)
_DEFAULTS = "field_defaults"  # the function of the model files that makes fields of an annotated class


class DeclaredConnection(NamedTuple):
    """What a residual connection, or a preset of one, declares.

    Attributes:
        module: The import name of the file that declares it.
        class_name: The name of its class.
        options: The options of a retrofit, such as `block_size`.
        fields: The configuration fields that a retrofit can set: of the connection, and of gates and value residuals.
    """

    module: str
    class_name: str
    options: tuple[str, ...]
    fields: tuple[str, ...]


_registered: dict[str, DeclaredConnection] = {}


def register_connection(name: str, options: Collection[str], fields: Collection[str]) -> None:
    """Add a residual connection that is registered at run time.

    Args:
        name: The name of the connection.
        options: As in [`DeclaredConnection`].
        fields: Its own configuration fields.
    """
    shared = _read_connections()[1]
    _registered[name] = DeclaredConnection("", "", tuple(options), (*fields, *shared))


def declared_connections() -> dict[str, DeclaredConnection]:
    """Return what every residual connection and every preset declares, by its name. The first is the default."""
    return _read_connections()[0] | _registered


@cache
def backbones() -> tuple[str, ...]:
    """Return the model types of `transformers` whose decoders can have other residual connections."""
    table = _assigned(_parse(_folder("attnres") / "configuration_attnres.py"), "BACKBONES")
    return tuple(key.value for key in table.keys)


@cache
def _read_connections() -> tuple[dict[str, DeclaredConnection], tuple[str, ...]]:
    """Return the connections and presets by name, and the fields that each of them can set beside its own."""
    classes: dict[str, ast.ClassDef] = {}
    modules: dict[str, str] = {}
    shared: list[str] = []
    for path in sorted(_folder("attnres").glob("*_attnres.py")):
        text = path.read_text(encoding="utf-8")
        if _DECLARES.search(text):  # the other files are long, and parsing them takes time
            tree = ast.parse(text)
            classes |= _classes(tree)
            modules |= dict.fromkeys(_classes(tree), f"attnres.{path.stem}")
            values = (node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
            shared += filter(None, map(_declaration, values))

    def lineage(name: str) -> Iterator[ast.ClassDef]:
        """Yield a class and its bases, as far as the files declare them."""
        if name in classes:
            yield classes[name]
            for base in classes[name].bases:
                yield from lineage(ast.unparse(base))

    def fields_of(declaration: str) -> list[str]:
        return [name for base in reversed([*lineage(declaration)]) for name, _ in _annotations(base)]

    own = {}  # connection -> its options and its own fields
    for name in classes:
        title = _assigned(classes[name], "name")
        bases = [*lineage(name)]
        if not isinstance(title, ast.Constant) or "ResidualConnection" not in (base.name for base in bases):
            continue
        options = next(filter(None, (_assigned(base, "options") for base in bases)))
        plan = next(node for base in bases for node in base.body if getattr(node, "name", "") == "plan_retrofit")
        fields = next(filter(None, (_assigned(base, "fields") for base in bases)))
        arguments = plan.args.args[len(plan.args.args) - len(plan.args.defaults) :]
        names = [*(key.value for key in options.keys), *(argument.arg for argument in arguments)]
        # A later class takes the place of its base of the same name.
        own[title.value] = modules[name], name, names, fields_of(_declaration(fields) or "")
    presets = ast.literal_eval(_assigned(_parse(_folder("attnres") / "family.py"), "PRESETS"))
    own |= {name: own[preset["residual_connection"]] for name, preset in presets.items()}
    added = tuple(field for declaration in shared for field in fields_of(declaration))
    declared = {
        name: DeclaredConnection(module, title, (*options,), (*fields, *added))
        for name, (module, title, options, fields) in own.items()
    }
    return declared, added


def _folder(package: str) -> Path:
    """Return the folder of a package without importing it."""
    return Path(find_spec(package).submodule_search_locations[0])


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _annotations(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the annotated names in the body of a class, with their annotations."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            yield item.target.id, item.annotation


def _assigned(node: ast.Module | ast.ClassDef, name: str) -> Any:
    """Return the expression that a module or class assigns to a name; `None` if it assigns none."""
    for item in node.body:
        targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return item.value
    return None


def _declaration(value: ast.expr | None) -> str | None:
    """Return the name of the class in an expression `field_defaults(CLASS)`; `None` for another expression."""
    is_call = isinstance(value, ast.Call) and ast.unparse(value.func) == _DEFAULTS
    return ast.unparse(value.args[0]) if is_call else None


__all__ = ["DeclaredConnection", "backbones", "declared_connections", "register_connection"]
