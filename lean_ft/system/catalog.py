"""Find recipes and presets: those that ship with lean_ft by name, the user's by path.

In a checkout they are next to the package, in `recipes/` and `configs/`; a wheel includes them. A recipe is a file with
a `Config` (a pydantic model) and a `main(config)`. Listing reads files without running them. An alias is another name
for a recipe, which may turn on one group of its settings, so that familiar names work without a second training loop.
"""

import ast
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, create_model

from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import line_in, run_file

_PACKAGE = Path(__file__).parents[1]
# alias -> recipe, and the group of settings that it turns on, or None
_ALIASES: dict[str, tuple[str, str | None]] = {
    "lora_finetune_single_device": ("finetune", "lora"),
    "full_finetune_distributed": ("finetune", None),
    "lora_finetune_distributed": ("finetune", "lora"),
    "lora_dpo_single_device": ("dpo", "lora"),
    "full_dpo_distributed": ("dpo", None),
    "lora_dpo_distributed": ("dpo", "lora"),
}

TRAIN_NOTHING = ("chat", "evaluate", "generate", "quantize")  # recipes that use a trained model

Found = TypeVar("Found")


@dataclass(frozen=True)
class Alias:
    """Another name for the recipe in `file`, which turns on the settings `group` unless it is None."""

    name: str
    file: Path
    group: str | None


def _shipped(inside_wheel: str, beside_package: str) -> Path:
    folder = _PACKAGE / inside_wheel
    return folder if folder.is_dir() else _PACKAGE.parent / beside_package


def recipes() -> dict[str, Path]:
    """Return the recipes that ship with lean_ft: name -> file."""
    files = _shipped("_recipes", "recipes").glob("*.py")
    return {file.stem: file for file in sorted(files) if not file.stem.startswith("_")}


def aliases() -> dict[str, Alias]:
    """Return the aliases of shipped recipes by name."""
    files = recipes()
    return {name: Alias(name, files[recipe], group) for name, (recipe, group) in _ALIASES.items() if recipe in files}


def without_alias(recipe_name: str) -> str:
    """Return the recipe that an alias stands for; any other name is returned unchanged."""
    return _ALIASES[recipe_name][0] if recipe_name in _ALIASES else recipe_name


def presets() -> dict[str, Path]:
    """Return the presets that ship with lean_ft: name (`tiny/full`) -> file."""
    folder = _shipped("_configs", "configs")
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}


def shipped_config(model: str) -> Path | None:
    """Return the folder with the config.json that ships with the presets of a Hub model, or None."""
    named = re.compile(rf"^  path: {re.escape(model)}$", re.MULTILINE)
    files = (file for name, file in presets().items() if not name.startswith("tiny/"))
    return next((file.parent for file in files if named.search(file.read_text(encoding="utf-8"))), None)


def is_shipped_config(folder: Path) -> bool:
    """Whether the folder holds presets of a model, with its config.json and without a tokenizer."""
    return any(file.parent == folder for file in presets().values())


def find_recipe(name_or_path: str) -> Path | Alias:
    """Return a recipe's file or alias, given by name or path. Raises ValueError with the nearest name."""
    return _find(name_or_path, {**recipes(), **aliases()}, what="recipe", suffixes=(".py",))


def find_preset(name_or_path: str) -> Path:
    """Return a preset's file, given by name or path. Raises ValueError with the nearest name."""
    return _find(name_or_path, presets(), what="preset", suffixes=(".yaml", ".yml"))


def find_either(name_or_path: str) -> Path | Alias:
    """Return a recipe's or preset's file or an alias, given by name or path. Raises ValueError with the nearest
    name."""
    either = {**recipes(), **aliases(), **presets()}
    return _find(name_or_path, either, what="recipe or preset", suffixes=(".py", ".yaml", ".yml"))


def copy_to(original: Path | Alias, destination_name: str, force: bool = False) -> Path:
    """Copy a recipe or preset to a file or into a folder (an existing one, or a name that ends in `/`); return the
    copy's path.

    The copy of an alias has the alias's name, with its group turned on. Missing folders and a missing suffix are added.
    Raises ValueError if the file exists, unless `force`.
    """
    source = original.file if isinstance(original, Alias) else original
    destination = Path(destination_name).expanduser()
    if destination.is_dir() or destination_name.endswith(("/", os.sep)):
        destination = destination / (f"{original.name}.py" if isinstance(original, Alias) else source.name)
    elif destination.suffix != source.suffix:
        destination = destination.with_name(destination.name + source.suffix)
    if destination.exists() and destination.samefile(source):
        raise ValueError(f"{destination} is the original; choose another name.")
    if destination.exists() and not force:
        raise ValueError(f"{destination} exists; choose another name, or overwrite it with --force.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)
    if isinstance(original, Alias) and original.group is not None:
        text = destination.read_text(encoding="utf-8")
        on = re.sub(rf"^(    {original.group}: (\w+) \| None = )None.*$", r"\1\2()", text, count=1, flags=re.MULTILINE)
        assert on != text, f"{source} has no line that turns {original.group} off"
        destination.write_text(on, encoding="utf-8")
    return destination


def _find(wanted: str, shipped: Mapping[str, Found], what: str, suffixes: tuple[str, ...]) -> Found | Path:
    if wanted in shipped:
        return shipped[wanted]
    path, kinds = Path(wanted), " or ".join(suffixes)
    if path.is_file() and path.suffix in suffixes:
        return path
    if path.is_file():
        raise ValueError(f"{wanted}: expected a {what}, which is a {kinds} file.")
    if path.suffix in suffixes:
        name = path.with_suffix("").as_posix()
        hint = f" Did you mean '{name}'?" if name in shipped else did_you_mean(name, shipped)
        raise FileNotFoundError(f"no such file: {wanted}.{hint}")
    if what == "recipe" and wanted in presets():
        raise ValueError(f"'{wanted}' is a preset: leanft run --config {wanted}")
    if "=" in wanted:
        raise ValueError(f"expected the {what} before any key=value, found '{wanted}'.")
    raise ValueError(
        f"no {what} is called '{wanted}'.{did_you_mean(wanted, shipped)} "
        f"`leanft ls` lists them. For your own {what}, give the path of its {kinds} file."
    )


def summary(file: Path | Alias) -> str:
    """Return a one-line summary of a recipe or preset without running it: the first paragraph of a recipe's docstring,
    or the comment at the start of a preset; empty if there is none."""
    if isinstance(file, Alias):
        return file.file.stem + (
            f" with the settings `{file.group}` turned on." if file.group else ", by another name."
        )
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix != ".py":
        comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
        return " ".join(line.removeprefix("#").strip() for line in comment)
    try:
        docstring = ast.get_docstring(ast.parse(text)) or ""
    except (SyntaxError, ValueError):
        return "(not valid Python)"
    return " ".join(docstring.partition("\n\n")[0].split())


def load_recipe(recipe: Path | Alias) -> ModuleType:
    """Run a recipe's file as a module and return it, with its `Config` and `main`. The `Config` of an alias has its
    group on.

    Raises ValueError, with the line, if the file cannot be run, and if `Config` or `main` is missing.
    """
    if isinstance(recipe, Alias):
        module = load_recipe(recipe.file)
        if recipe.group is None:
            return module
        group = module.Config.model_fields[recipe.group]
        (settings,) = (member for member in get_args(group.annotation) if member is not type(None))
        fields: dict[str, Any] = {recipe.group: (group.annotation, settings())}
        vars(module)["Config"] = create_model("Config", __base__=module.Config, __module__=module.__name__, **fields)
        return module
    folder = str(recipe.resolve().parent)
    if recipe not in recipes().values() and folder not in sys.path:
        sys.path.append(folder)  # for modules next to a user's recipe; last, so that they hide no library
    try:
        module = run_file(recipe, f"recipes.{recipe.stem}")
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    except Exception as error:
        raise ValueError(f"{line_in(recipe, error)}: {type(error).__name__}: {error}") from error
    config_class, main = getattr(module, "Config", None), getattr(module, "main", None)
    if not (isinstance(config_class, type) and issubclass(config_class, BaseModel)) or not callable(main):
        raise ValueError(
            f"{recipe} is not a recipe: expected a class `Config(RecipeConfig)` and a function `main(cfg)`. To start "
            "from a shipped recipe, run `leanft cp RECIPE DEST`."
        )
    try:
        config_class.model_rebuild()  # reports a field with an unsupported type here, with the file
    except Exception as error:
        raise ValueError(f"{recipe}: {type(error).__name__}: {error}") from error
    return module


def is_shipped(recipe: ModuleType) -> bool:
    """Whether a loaded recipe ships with lean_ft."""
    return Path(recipe.__file__ or "") in recipes().values()
