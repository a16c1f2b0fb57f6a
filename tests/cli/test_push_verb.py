"""`leanft push`, with the Hub's client and a server on loopback."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from lean_ft.export import upload
from lean_ft.export.model_card import model_card
from lean_ft.hub import download as hub
from lean_ft.hub.paths import resolve_model_path
from lean_ft.peft.finished_models import find_finished
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.system.units import gibibytes
from tests.hub.hub_server import SIGNATURE, TOKEN, HubServer

IDS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "full"
    module = load_recipe(find_recipe("finetune"))
    settings = ["model.path=tiny", "model.dtype=float32", "data.source=tiny/train.jsonl", "batch_size=4", "device=cpu"]
    settings += ["max_steps=3", "data.validation_fraction=0.01", "plan=false", f"log.project={TOKEN}"]
    module.main(load_config(module.Config, None, [*settings, f"output_dir={folder}"]))
    return folder


@pytest.fixture
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no curves, which takes a second."""
    monkeypatch.setattr(upload, "draw_curves", lambda runs, picture: picture.write_bytes(b"\x89PNG"))


@pytest.fixture
def server(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the test server does not implement Xet storage
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub_server


def files_of(server: HubServer, repo: str) -> dict[str, bytes]:
    repository = server.repositories[repo]
    return repository.commits[repository.revisions["main"]]


@pytest.mark.long
def test_a_run_is_pushed_and_comes_back_with_a_card(leanft, run: Path, server: HubServer) -> None:
    """The card says how the model was made, and no secret."""
    answer = leanft.ok("push", run, "me/mine")
    files, newest = files_of(server, "me/mine"), run / "step_00000003"
    assert answer.out == f"pushed  {server.url}/me/mine/commit/{server.repositories['me/mine'].revisions['main']}\n"
    beside = {"README.md", "config.yaml", "curves.png"}
    assert files.keys() - beside == {p.name for p in newest.iterdir()} - {"training_state", "manifest.json"}
    assert all(files[name] == (newest / name).read_bytes() for name in files.keys() - beside)
    assert files["curves.png"].startswith(b"\x89PNG")
    assert server.repositories["me/mine"].private
    back = AutoModelForCausalLM.from_pretrained(hub.download("me/mine").folder)
    assert torch.equal(back(IDS).logits, AutoModelForCausalLM.from_pretrained(newest)(IDS).logits)

    card = files["README.md"].decode()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "trained with lean_ft's recipe `finetune` (step_00000003 of the run)" in card
    assert "| optimizer steps | 3 |" in card
    assert f"| tokens | {sum(row.get('tokens', 0) for row in rows):,} |" in card
    assert f"| loss, first and last | {rows[0]['loss']:.4g}," in card
    assert f"| held-out loss | {rows[-1]['eval_loss']:.4g}" in card
    assert "optimizer.lr" not in card and "max_steps: 3" in card and "2.0e-05" in files["config.yaml"].decode()
    assert (
        card.index("## Results") < card.index("## Use") < card.index("## Settings")
        and '"tiny/train.jsonl"' in card
        and f"- torch: {torch.__version__}" in card
    )
    assert "![Curves of the run](curves.png)" in card
    config = files["config.yaml"].decode()
    assert TOKEN not in card + config and "[token]" in config and SIGNATURE not in card


@pytest.mark.long
@pytest.mark.parametrize("kind", ["run", "adapter"])
def test_the_code_of_a_card_answers(kind: str, request: pytest.FixtureRequest, tmp_path: Path, capsys) -> None:
    source = find_finished(request.getfixturevalue(kind))
    if kind == "adapter":
        source = Path(shutil.copytree(source, tmp_path / kind))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve_model_path("tiny") / name, source)
    card = model_card(source, None, "me/mine", has_picture=False)
    code = card.partition("```python\n")[2].partition("```")[0]
    exec(code.replace("me/mine", str(source)).replace("max_new_tokens=200", "max_new_tokens=3"), {})
    assert capsys.readouterr().out.strip() and ("With peft" in card) == (kind == "adapter")


@pytest.mark.usefixtures("without_curves")
def test_an_adapter_goes_as_peft_reads_it(leanft, adapter: Path, server: HubServer) -> None:
    leanft.ok("push", adapter, "me/adapter", "--public")
    assert not server.repositories["me/adapter"].private
    files = files_of(server, "me/adapter")
    assert files.keys() >= {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert "library_name: peft" in files["README.md"].decode()
    assert not any(name.startswith("model") for name in files)
    assert files["adapter_model.safetensors"] == (adapter / "adapter_model.safetensors").read_bytes()


@pytest.mark.usefixtures("without_curves")
@pytest.mark.long
@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_dry_run_prints_what_a_push_uploads_and_sends_nothing(
    leanft, run: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    answer = leanft("push", run, "me/mine", "--license", "apache-2.0", "--dry-run")
    assert (answer.code, answer.err, server.requests) == (0, "", [])
    assert ("no token was found" in answer.out) == (token is None)
    assert "names no base model" in answer.out and "no license" not in answer.out and TOKEN not in answer.out
    assert "created as a private repository" in answer.out and answer.out.endswith("nothing was uploaded.\n")
    assert "the card has no license" in leanft("push", run, "me/mine", "--dry-run").out
    remote = leanft("push", "org/model", "me/mine", "--dry-run")
    assert (remote.code, server.requests) == (2, []) and "leanft download org/model" in remote.err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    leanft.ok("push", run, "me/mine", "--license", "apache-2.0")
    files = files_of(server, "me/mine")
    listed = dict(re.findall(r"^(\S+) +([\d.]+ \w?i?B)$", answer.out, re.MULTILINE))
    assert listed == {name: gibibytes(len(content)) for name, content in files.items()}
    assert files["README.md"].decode() in answer.out
    assert yaml.safe_load(files["README.md"].decode().split("---")[1])["license"] == "apache-2.0"


@pytest.mark.usefixtures("without_curves")
@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"token": None}, 2, "push needs a token that may write"),
        ({"token": "hf_AnotherTokenThatIsWrong1"}, 2, "your token may not write to me/mine (error 401)"),
        ({"token_may_write": False}, 2, "your token may not write to me/mine (error 403)"),
        ({"failing_status": 500}, 1, "answered with error 500; me/mine is unchanged"),
        ({"repo": "me/" + "a" * 97}, 2, "a" * 97),
        ({"repo": "mine"}, 2, "mine is not the name of a repository; expected org/name"),
        ({"source": "nowhere"}, 2, "model path 'nowhere' does not exist"),
    ],
)
def test_what_goes_wrong_is_one_message_without_the_token(
    leanft, run: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch, change: dict, code: int, message: str
) -> None:
    if (token := change.get("token", TOKEN)) is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    server.token_may_write = change.get("token_may_write", True)
    server.failing_status = change.get("failing_status")
    answer = leanft("push", change.get("source", run), change.get("repo", "me/mine"))
    assert (answer.code, message in answer.err) == (code, True), answer.err
    assert not token or token not in answer.out + answer.err


@pytest.mark.parametrize("draws", [False, pytest.param(True, marks=pytest.mark.long)])
def test_damaged_lines_of_a_run_are_left_out_of_cards_tables_and_curves(
    leanft, run: Path, tmp_path: Path, draws: bool
) -> None:
    def card(folder: Path) -> str:
        return upload.model_card(folder / "step_00000003", folder, "me/mine", has_picture=False)

    damaged = Path(shutil.copytree(run, tmp_path / "full"))
    lines = (damaged / "metrics.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[-1]) | {"tokens": 5}
    odd = [{}, [], 5, None, {"step": None}, {**row, "step": -1}, {**row, "step": 10**400}, {**row, "x": float("nan")}]
    counts = ("tokens", "step_seconds", "peak_memory_bytes", "eval_loss")
    odd += [{**row, name: value} for name in counts for value in ("x", [1], {"a": 1}, True, 10**400)]
    between = [*(json.dumps(one) + "\n" for one in odd), "[" * 9000 + "\n"]
    (damaged / "metrics.jsonl").write_text("".join([lines[0], *between, *lines[1:], lines[-1][:-9]]))
    assert card(damaged) == card(run)
    listed = [json.loads(leanft.ok("runs", folder, "--json").out) for folder in (damaged, run)]
    assert listed[0] == listed[1]
    if draws:
        leanft.ok("plot", damaged)
    starts = json.loads((damaged / "run.json").read_text())
    del starts["starts"][-1]["recipe"]
    starts["starts"][-1]["settings"]["model.path"] = 5
    (damaged / "run.json").write_text(json.dumps(starts))
    assert "| optimizer steps | 3 |" in card(damaged)
