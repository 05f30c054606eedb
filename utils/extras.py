"""Import packages that only an extra of `attnres` installs, such as matplotlib by `attnres[analysis]`."""

from collections.abc import Generator
from contextlib import contextmanager

from .wording import install_command


@contextmanager
def require_extra(extra: str) -> Generator[None]:
    """Replace the error of a failed import in the block by one line with the command to install the extra.

    Use it around the imports of optional packages:

        with require_extra("analysis"):
            import matplotlib

    Args:
        extra: The extra of `attnres` that installs the packages.

    Raises:
        ModuleNotFoundError: A package that the block imports is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        # A missing module of `attnres` is a bug, and no extra would help.
        if package in ("", "attnres"):
            raise
        raise ModuleNotFoundError(
            f"the package {package} is not installed. It comes with `attnres[{extra}]`: {install_command(extra)}",
            name=error.name,
        ) from error


__all__ = ["require_extra"]
