"""Read from source text what classes declare: names, fields and options, without importing the classes.

The files that declare them import PyTorch, which takes seconds. The command line and recipes refuse a misspelt name
before that. Residual connections are found in three places: the files of this package, modules that installed packages
name by entry points of the group `attnres.connections`, and files that [`import_files`] was given.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from .packaged import package_folder

ENTRY_POINTS = "attnres.connections"
# The package, which has no folder, of the modules that are made of imported files.
IMPORTED = "attnres_imports"
_DECLARES = re.compile(r"field_defaults|ResidualConnection|^    name = ", re.MULTILINE)
_DEFAULTS = "field_defaults"  # the function of the model files that makes fields of an annotated class


class DeclaredConnection(NamedTuple):
    """What a residual connection, or a preset of one, declares.

    Attributes:
        module: The import name of its file.
        class_name: The name of its class.
        options: The options of a retrofit, such as `block_size`.
        fields: The configuration fields that a retrofit can set: of the connection, and of gates and value residuals.
        summary: What it is, in a few words.
        reference: Where it was published.
        used_by: Published models, or recipes of others.
        state_size: The state between sublayers, in tensors `[tokens, hidden]`.
        exact: The forms in which a retrofit keeps the function: "yes" for all, "no" for none.
        measured: What benchmarks measured: "step", the time of a training step over that of the standard model.
    """

    module: str
    class_name: str
    options: tuple[str, ...]
    fields: tuple[str, ...]
    summary: str
    reference: str
    used_by: str
    state_size: str
    exact: str
    measured: dict[str, str]


_registered: dict[str, DeclaredConnection] = {}
_files: dict[str, Path] = {}  # import names of the files that were given to `import_files`
_loaders: list[Callable[[str, Path], None]] = []


def import_files(paths: Iterable[str | Path]) -> None:
    """Make the residual connections in Python files known.

    Their names and fields are read at once. The classes are loaded when `attnres` registers its model family, or now if
    it has done so.

    Args:
        paths: The files. A file that was imported before is left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is no Python, declares no connection, or has a name that no import can have; or another file
            of this name was imported.
    """
    for path in paths:
        path = Path(path).expanduser().resolve()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path} to import.")
        if not path.stem.isidentifier():  # code beside weights imports the file by its name
            raise ValueError(f"{path} cannot be imported by its name: give it one of letters, digits and underscores.")
        module = f"{IMPORTED}.{path.stem}"
        if module in _files and _files[module] != path:
            raise ValueError(f"{path} has the name of {_files[module]}, which was imported. Rename one of them.")
        if module in _files:
            continue
        _files[module] = path
        try:
            if not any(declared.module == module for declared in declared_connections().values()):
                raise ValueError(f"{path} declares no class that derives from ResidualConnection and has a `name`.")
        except (SyntaxError, ValueError) as error:
            del _files[module]
            raise ValueError(f"{path} is no Python: {error}") if isinstance(error, SyntaxError) else error from None
        for load in _loaders:
            load(module, path)


def load_imported_files(load: Callable[[str, Path], None]) -> None:
    """Call a function with the import name and the path of every imported file, also of those imported later."""
    _loaders.append(load)
    for module, path in [*_files.items()]:
        load(module, path)


def entry_point_modules() -> list[str]:
    """Return the modules of installed packages that declare connections, by their entry points."""
    return sorted({entry.module for entry in entry_points(group=ENTRY_POINTS)})


def register_connection(connection: Any) -> None:
    """Add the class of a residual connection that is registered at run time."""
    fields = (*connection.fields, *_read(_sources())[1])
    exact = connection.exact or ("no" if connection.retrofit is None else "yes")
    of_class = vars(connection)
    _registered[connection.name] = DeclaredConnection(
        connection.__module__,
        connection.__qualname__,
        tuple(connection.retrofit_options()),
        fields,
        summary=of_class.get("summary", ""),
        reference=of_class.get("reference", ""),
        used_by=of_class.get("used_by", ""),
        state_size=connection.state_size,
        exact=exact,
        measured=of_class.get("measured", {}),
    )


def declared_connections() -> dict[str, DeclaredConnection]:
    """Return what every residual connection and every preset declares, by its name. The first is the default."""
    return _read(_sources())[0] | _registered


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return the fields of each preset of a connection."""
    return ast.literal_eval(_assigned(_parse(package_folder("attnres") / "family.py"), "PRESETS"))


@cache
def backbones() -> tuple[str, ...]:
    """Return the model types of `transformers` whose decoders can have other residual connections."""
    table = _assigned(_parse(package_folder("attnres") / "configuration_attnres.py"), "BACKBONES")
    return tuple(key.value for key in table.keys)


def _sources() -> tuple[tuple[str, Path], ...]:
    """Return import name and path of every file that may declare a connection."""
    return (*_own_files(), *_files.items())


@cache
def _own_files() -> tuple[tuple[str, Path], ...]:
    """Return import name and path of this package's files, and of those that entry points name."""
    own = ((f"attnres.{path.stem}", path) for path in sorted(package_folder("attnres").glob("*_attnres.py")))
    paths = ((module, _path_of(module)) for module in entry_point_modules())
    return (*own, *((module, path) for module, path in paths if path is not None))


def _path_of(module: str) -> Path | None:
    """Return the path of another package's module; `None` if it cannot be found, or is no Python."""
    # `attnres` warns of the mistake when it loads the module. To find a module, Python imports its package.
    with suppress(Exception):
        spec = find_spec(module)
        if spec is not None and spec.origin:
            _parse(Path(spec.origin))
            return Path(spec.origin)
    return None


@cache
def _read(sources: tuple[tuple[str, Path], ...]) -> tuple[dict[str, DeclaredConnection], tuple[str, ...]]:
    """Return the connections and presets by name, and the fields that each of them can set beside its own."""
    classes: dict[str, ast.ClassDef] = {}
    modules: dict[str, str] = {}
    shared: list[str] = []
    for module, path in sources:
        text = path.read_text(encoding="utf-8")
        if _DECLARES.search(text):  # the other files are long, and parsing them takes time
            tree = ast.parse(text)
            classes |= _classes(tree)
            modules |= dict.fromkeys(_classes(tree), module)
            values = (node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
            shared += filter(None, map(_declaration, values))

    def lineage(name: str) -> Iterator[ast.ClassDef]:
        """Yield a class and its bases, as far as the files declare them."""
        if name in classes:
            yield classes[name]
            for base in classes[name].bases:
                yield from lineage(ast.unparse(base).rpartition(".")[2])

    def annotated(declaration: str | None) -> list[str]:
        """Return the fields that a class and its bases annotate."""
        return [name for base in reversed([*lineage(declaration or "")]) for name, _ in _annotations(base)]

    added = tuple(field for declaration in shared for field in annotated(declaration))
    declared: dict[str, DeclaredConnection] = {}
    for title, node in classes.items():
        name, bases = _literal([node], "name"), [*lineage(title)]
        if not isinstance(name, str) or "ResidualConnection" not in (base.name for base in bases):
            continue
        methods = (item for base in bases for item in base.body if isinstance(item, ast.FunctionDef))
        parameters = next(method.args for method in methods if method.name == "plan_retrofit")
        arguments = parameters.args[len(parameters.args) - len(parameters.defaults) :]
        fields = next(filter(None, (_assigned(base, "fields") for base in bases)))
        names = [*ast.literal_eval(fields)] if isinstance(fields, ast.Dict) else annotated(_declaration(fields))
        # A later class takes the place of its base of the same name.
        declared[name] = DeclaredConnection(
            modules[title],
            title,
            (*_literal(bases, "options"), *(argument.arg for argument in arguments)),
            (*names, *added),
            summary=_literal([node], "summary") or "",
            reference=_literal([node], "reference") or "",
            used_by=_literal([node], "used_by") or "",
            state_size=_literal(bases, "state_size"),
            exact=_literal(bases, "exact") or ("no" if _literal(bases, "retrofit") is None else "yes"),
            measured=_literal([node], "measured") or {},
        )
    for name, preset in presets().items():
        declared[name] = declared[preset["residual_connection"]]
    return declared, added


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _annotations(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the annotated names in the body of a class, with their annotations."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, item.annotation


def _assigned(node: ast.Module | ast.ClassDef, name: str) -> Any:
    """Return the expression that a module or class assigns to a name; `None` if it assigns none."""
    for item in node.body:
        if not isinstance(item, ast.Assign | ast.AnnAssign):
            continue
        targets = item.targets if isinstance(item, ast.Assign) else [item.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return item.value
    return None


def _literal(bases: Iterable[ast.ClassDef], name: str) -> Any:
    """Return the value that the first of some classes assigns to a name; `None` if it is not written out."""
    value = next(filter(None, (_assigned(base, name) for base in bases)), None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def _declaration(value: ast.expr | None) -> str | None:
    """Return the name of the class in an expression `field_defaults(CLASS)`; `None` for another expression."""
    is_call = isinstance(value, ast.Call) and ast.unparse(value.func) == _DEFAULTS
    return ast.unparse(value.args[0]) if is_call else None


__all__ = [
    "DeclaredConnection",
    "backbones",
    "declared_connections",
    "entry_point_modules",
    "import_files",
    "load_imported_files",
    "presets",
    "register_connection",
]
