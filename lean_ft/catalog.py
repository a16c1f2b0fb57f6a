"""Finds recipes and presets: those that ship with lean_ft by name, the user's own by path.

In a checkout they lie beside the package, in `recipes/` and `configs/`; a wheel carries them inside it. A recipe is
a file with a `Config` (a pydantic model) and a `main(config)`. Listing reads the files and never runs them.
"""

import ast
import os
import shutil
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from itertools import takewhile
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel

from lean_ft.spelling import did_you_mean

_PACKAGE = Path(__file__).parent


def _shipped(inside_wheel: str, beside_package: str) -> Path:
    folder = _PACKAGE / inside_wheel
    return folder if folder.is_dir() else _PACKAGE.parent / beside_package


def recipes() -> dict[str, Path]:
    """The recipes that ship with lean_ft: name -> file."""
    files = _shipped("_recipes", "recipes").glob("*.py")
    return {file.stem: file for file in sorted(files) if not file.stem.startswith("_")}


def presets() -> dict[str, Path]:
    """The presets that ship with lean_ft: name (`tiny/full`) -> file."""
    folder = _shipped("_configs", "configs")
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe, given by name or path. Raises ValueError with the nearest name."""
    return _find(name_or_path, recipes(), what="recipe", suffixes=(".py",))


def find_preset(name_or_path: str) -> Path:
    """The file of a preset, given by name or path. Raises ValueError with the nearest name."""
    return _find(name_or_path, presets(), what="preset", suffixes=(".yaml", ".yml"))


def find_either(name_or_path: str) -> Path:
    """The file of a recipe or a preset, given by name or path. Raises ValueError with the nearest name."""
    either = {**recipes(), **presets()}
    return _find(name_or_path, either, what="recipe or preset", suffixes=(".py", ".yaml", ".yml"))


def copy_to(source: Path, destination_name: str, force: bool = False) -> Path:
    """Copies a recipe or preset to a file, or into a folder (one that is there, or a name that ends in `/`).

    Returns the copy's path. Missing folders are made, and a missing suffix is added. Raises ValueError rather than
    overwrite, unless `force`.
    """
    destination = Path(destination_name).expanduser()
    if destination.is_dir() or destination_name.endswith(("/", os.sep)):
        destination = destination / source.name
    elif destination.suffix != source.suffix:
        destination = destination.with_name(destination.name + source.suffix)
    if destination.exists() and destination.samefile(source):
        raise ValueError(f"{destination} is the file itself; choose another place.")
    if destination.exists() and not force:
        raise ValueError(f"{destination} is there already; choose another name, or overwrite it with --force.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)
    return destination


def _find(wanted: str, shipped: dict[str, Path], what: str, suffixes: tuple[str, ...]) -> Path:
    if wanted in shipped:
        return shipped[wanted]
    path, kinds = Path(wanted), " or ".join(suffixes)
    if path.is_file() and path.suffix in suffixes:
        return path
    if path.is_file():
        raise ValueError(f"{wanted}: expected a {what}, which is a {kinds} file.")
    if path.suffix in suffixes:
        raise FileNotFoundError(f"no such file: {wanted}.{did_you_mean(path.with_suffix('').as_posix(), shipped)}")
    if "=" in wanted:
        raise ValueError(f"expected the {what} before any key=value, came '{wanted}'.")
    raise ValueError(
        f"no {what} is called '{wanted}'.{did_you_mean(wanted, shipped)} "
        f"`leanft ls` lists them; a {what} of your own is given as the path of its {kinds} file."
    )


def summary(file: Path) -> str:
    """What a recipe or preset says of itself, on one line, read without running it; empty where it says nothing.

    That is the first paragraph of a recipe's docstring, and the comment that a preset begins with.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix != ".py":
        comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
        return " ".join(line.removeprefix("#").strip() for line in comment)
    try:
        docstring = ast.get_docstring(ast.parse(text)) or ""
    except (SyntaxError, ValueError):
        return "(not valid Python)"
    return " ".join(docstring.partition("\n\n")[0].split())


def load_recipe(recipe: Path) -> ModuleType:
    """Runs a recipe's file as a module and returns it, with its `Config` and `main`.

    Raises ValueError where the file cannot be run, with its line, or lacks one of the two.
    """
    name = f"recipes.{recipe.stem}"
    spec = spec_from_file_location(name, recipe)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # Registered before it runs: pydantic and dataclasses look their module up to resolve annotations.
    sys.modules[name] = module
    folder = str(recipe.resolve().parent)
    if recipe not in recipes().values() and folder not in sys.path:
        sys.path.append(folder)  # what lies beside a user's recipe can be imported; last, so it hides no library
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    except Exception as error:
        raise ValueError(f"{_line_in(recipe, error)}: {type(error).__name__}: {error}") from error
    config_class, main = getattr(module, "Config", None), getattr(module, "main", None)
    if not (isinstance(config_class, type) and issubclass(config_class, BaseModel)) or not callable(main):
        raise ValueError(
            f"{recipe} is not a recipe: expected a class `Config(RecipeConfig)` and a function `main(cfg)`. "
            "`leanft cp RECIPE DEST` gives you one to start from."
        )
    return module


def _line_in(recipe: Path, error: BaseException) -> str:
    """Where in the recipe an error came from, even when it was raised deeper."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(recipe)]
    return f"{recipe}, line {frames[-1].lineno}" if frames else str(recipe)
