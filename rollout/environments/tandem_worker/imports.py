"""Imports the user's modules, in an environment's process and in Tandem's own."""

from __future__ import annotations

import importlib
import os
import sys

from .failures import Failure, describe


def imported(name, others, missing):
    """The module ``name``, also from the current folder.

    others: the other modules besides those of the current folder, in words for a message. missing: what a message says of
    a missing module that this one imports. Raises Failure.
    """
    file = f"{name.removesuffix('.py')}.py"
    if os.sep in name:
        raise Failure(f"{name!r} is not the name of a module; {_fix_of_file(file)}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a user's file must not shadow an installed module
    importlib.invalidate_caches()  # the file may be newer than the interpreter's listing of its folder
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise Failure(f"{name} imports {error.name!r}, which {missing}; install it there") from error
        if os.path.isfile(file):
            raise Failure(f"{name!r} is not the name of a module; {_fix_of_file(file)}") from error
        raise Failure(
            f"there is no module {name!r} in {os.getcwd()} or among {others}; run from the folder that holds "
            f"{name.split('.')[0]}.py, or set PYTHONPATH"
        ) from error
    except SystemExit as error:
        raise Failure(
            f"importing {name} ends the process: {describe(error)}; "
            "put a script's code under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:  # the import of a user's module may raise anything
        raise Failure(f"importing {name} raised {describe(error)}; correct the module") from error


def _fix_of_file(file):
    """What to write instead of the name of a module's file."""
    path = os.path.relpath(file)[: -len(".py")]
    folder, module = os.path.split(path)
    if "." in module:  # an import would look for a module inside of a package
        plain = f"{module.replace('.', '_')}.py"
        return f"rename the file to {plain}, and {_fix_of_file(os.path.join(folder, plain))}"
    if "." not in path:  # neither above the current folder nor in one with a dot in its name
        return f"write {path.replace(os.sep, '.')!r}"
    folder, module = os.path.split(os.path.abspath(path))
    return f"write {module!r}, and set PYTHONPATH={folder}"
