"""Packages that only some users need: imported where they are used, and named when they are missing.

Synopsis:

    except ModuleNotFoundError as error:
        raise needs_extra("progress=True", "tqdm", "train") from error
"""

from __future__ import annotations


def needs_extra(what: str, package: str, extra: str) -> ModuleNotFoundError:
    """The error for a package that is not installed."""
    return ModuleNotFoundError(
        f'{what} needs {package}, which is not installed: pip install "jaxprefetch[{extra}]".', name=package
    )
