"""Input files cannot run code: no pickle, no eval, no YAML tags. Only code that the user names is imported."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for folder in ("lean_ft", "recipes", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "_pickle"}
BANNED_NAMES = {"eval", "exec", "__import__"}
BANNED_ATTRIBUTES = {"torch.load", "torch.save", "torch.hub", "numpy.load", "np.load", "os.system", "os.popen"}
BANNED_ATTRIBUTES |= {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}
BANNED_ATTRIBUTES |= {"yaml.UnsafeLoader", "yaml.FullLoader", "yaml.Loader"}
# Recipes, rewards, losses and formats are code in files that the user names.
ALLOWED = {"lean_ft/system/user_functions.py": ["exec_module"]}


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(source):
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in modules if name.partition(".")[0] in BANNED_MODULES]
            if isinstance(node, ast.ImportFrom):
                found += [f"{node.module}.{name}" for name in names if f"{node.module}.{name}" in BANNED_ATTRIBUTES]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_NAMES:
            found.append(node.func.id)
        if isinstance(node, ast.Attribute):
            found += [name for name in BANNED_ATTRIBUTES if dotted(node) == name]
            found += ["exec_module"] * (node.attr == "exec_module")
        if isinstance(node, ast.keyword):
            given = isinstance(node.value, ast.Constant) and node.value.value is True
            found += [str(node.arg)] * (given and node.arg in ("shell", "allow_pickle", "trust_remote_code"))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_source_does(path):
    allowed = ALLOWED.get(path.relative_to(ROOT).as_posix(), [])
    assert [name for name in offences(path.read_text()) if name not in allowed] == []


def test_the_ban_finds_what_it_bans_and_nothing_else():
    for source in (
        "import torch\ntorch.load(x)",
        "from torch import load",
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec(x)",
        "import yaml\nyaml.load(x, Loader=y)",
        "numpy.load(x, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
    ):
        assert offences(source), source
    assert offences("model.eval()\nyaml.safe_load(x)\nstate.load(x)") == []
