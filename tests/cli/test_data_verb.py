"""`leanft data`: lengths and rows of a run, without the model's weights."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from lean_ft.data import prepare_batches
from lean_ft.hub.paths import resolve_model_path
from lean_ft.settings import PreferenceDataConfig, SFTDataConfig, UnpairedDataConfig
from lean_ft.tokenizers import load_tokenizer


@pytest.fixture
def run(tmp_path):
    """Arguments of a run on 3 rows, with a tokenizer and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in resolve_model_path("tiny").iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    rows = [{"prompt": "Say [bold]it[/bold]", "completion": "yes " * count} for count in (1, 2, 300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["finetune", f"model.path={folder}", f"data.source={tmp_path}/rows.jsonl", "data.max_length=300"]


@pytest.fixture
def run_on_pairs(run, tmp_path):
    """Like `run`, for a recipe that trains on preference pairs."""
    rows = [{"prompt": "Say it", "chosen": "yes " * count, "rejected": "no"} for count in (1, 2, 300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["dpo", *run[1:]]


def test_stats_of_pairs(leanft, run_on_pairs, tmp_path):
    answer = leanft.quiet("data", "stats", *run_on_pairs)
    assert "3 rows (preference, detected from their fields); 3 pairs" in answer.out
    data, tokenizer = PreferenceDataConfig(source=f"{tmp_path}/rows.jsonl"), load_tokenizer("tiny")
    batches, _ = prepare_batches(data, tokenizer, batch_size=1, seed=0, share_prompts=True)
    assert f"both completions of a pair repeat: {batches.layout.arrangement.shared.sum()} (" in answer.out
    cut = [line.split()[:2] for line in answer.out.splitlines() if re.match(r" +[\d,]+ +\d+ \(", line)]
    assert cut[2:4] == [["512", "1"], ["1,024", "0"]]  # the long completion, 1 of 6 sequences


@pytest.mark.first(1)
@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_preview_of_pairs(leanft, run_on_pairs, tmp_path, packing: str):
    answer = leanft.quiet(
        "data", "preview", *run_on_pairs, "-n", "3", f"data.packing={packing}", "data.num_processes=2"
    )
    for place in ("line 1, chosen", "line 1, rejected", "line 3, chosen", "line 3, rejected"):
        assert f"rows.jsonl, {place}: " in answer.out
    assert re.search(r"Say it<.*⟦yes <\|end\|>⟧", answer.out)
    assert re.search(r"Say it<.*⟦no<\|end\|>⟧", answer.out)
    assert re.search(r"line 3: truncated by \d+ tokens", answer.out)
    page = tmp_path / "page.html"
    leanft("data", "preview", *run_on_pairs, "-n", "3", f"data.packing={packing}", "--html", page)
    (red,) = re.findall(r"\.(r\d+) {color: #800000", page.read_text())
    rejected = re.findall(rf'(\w+): \d+ tokens[^─]*?<span class="{red}">', page.read_text())
    assert rejected == ["rejected"] * 3


def test_rows_of_another_objective(leanft, run, run_on_pairs, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say it", "completion": "yes"}\n')
    for verb in ("stats", "preview"):
        refusal = leanft.refused("data", verb, *run_on_pairs)
        assert "the rows are prompt_completion, and this recipe trains on preference pairs" in refusal


def test_stats(leanft, run, tmp_path):
    answer = leanft.quiet("data", "stats", *run)
    assert "3 rows (prompt_completion, detected from their fields); 3 sequences" in answer.out
    assert "█" in answer.out
    header, *table = [line for line in answer.out.splitlines() if re.match(r" *(max_length|[\d,]+ +\d+ \()", line)]
    assert header.split("  ")[0] == "max_length"
    # 256 to 32k and the configured length. The 3 shortest lengths truncate the long row.
    lengths = ["256", "300", "512", "1,024", "2,048", "4,096", "8,192", "16,384", "32,768"]
    assert [line.split()[:2] for line in table] == [[length, "1" if i < 3 else "0"] for i, length in enumerate(lengths)]
    beyond = "beyond the model's context of 512"
    assert [line.split("%")[-1].strip() for line in table] == ["", "as set", "", *[beyond] * 6]
    assert all(line == line.rstrip() for line in answer.out.splitlines())


@pytest.mark.parametrize("share", [True, False])
def test_stats_of_a_mixture(leanft, run, tmp_path, share):
    others = [{"prompt": "q", "completion": "word " * (i % 9 + 1)} for i in range(40)]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    entry = "share: 0.7" if share else "weight: 2"
    run[2] = f"data.source=[{{path: {tmp_path}/others.jsonl, {entry}}}, {tmp_path}/rows.jsonl]"
    answer = leanft.quiet("data", "stats", *run)
    entry = {"share": 0.7} if share else {"weight": 2}
    source = [{"path": f"{tmp_path}/others.jsonl", **entry}, f"{tmp_path}/rows.jsonl"]
    config = SFTDataConfig.model_validate({"source": source, "max_length": 300})
    uses = prepare_batches(config, load_tokenizer(run[1].partition("=")[2]), 2, 0)[0].report.sources
    header, *table = [line for line in answer.out.splitlines() if re.match(rf"source +rows|{tmp_path}\S+ .*%", line)]
    assert bool(re.search("target +off", header)) == share and header.endswith("  epochs")
    for use, line in zip(uses, table, strict=True):
        off = [f"{use.target:,}", f"{use.off:+,}"] if share else []
        rows = [f"{use.num_rows:,}", f"{use.rows:,}", f"{use.tokens:,}", f"{use.trained:,}"]
        assert line.split() == [use.name, *rows, f"{use.reached:.2%}", *off, f"{use.epochs:.2f}"]
    times = [
        line.split()[:3]
        for line in answer.out.splitlines()
        if re.fullmatch(rf"{tmp_path}\S+ +\d+ +\d+( +line .*)?", line)
    ]
    assert times == [[use.name, str(n), str(number)] for use in uses for n, number in sorted(use.times.items())]
    # The log of a run says the same.
    log = leanft("run", *run, "model.random_init=true", "max_steps=1", "plan=false", f"output_dir={tmp_path}/run").out
    assert [line.removeprefix("source").strip() for line in log.splitlines() if line.startswith("source")] == [
        str(use) for use in uses
    ]


@pytest.mark.long
@pytest.mark.usefixtures("plans")
def test_stats_with_the_peaks_that_the_planner_predicts(leanft, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "Some words."}\n')
    run = ["full_finetune_single_device", "model.path=tiny", f"data.source={tmp_path}/rows.jsonl", "device=cpu"]
    settings = ["data.max_length=300", "data.batch_tokens=300", "optimizer.name=sgd"]
    answer = leanft.ok("data", "stats", *run, *settings, "--peak")
    # Without a terminal, each progress message is a line.
    assert answer.err.splitlines() == [f"simulating a step with rows of {length} tokens" for length in (256, 300)]
    said = {line.split()[0]: line for line in answer.out.splitlines() if re.match(r" +[\d,]+ +\d+ \(", line)}
    planned = leanft("plan", *run, *settings, f"output_dir={tmp_path}/run").out
    assert re.search(r"peak ([\d.]+ [MG]iB)", planned)[1] in said["300"]  # pyright: ignore[reportOptionalSubscript]
    assert "300 tokens a step" in planned
    assert all(re.search(r"\d [MG]iB", said[length]) for length in ("256", "300"))
    assert all(said[length].endswith("  -") for length in ("512", "1,024", "32,768"))


def test_preview(leanft, run, tmp_path):
    answer = leanft.quiet("data", "preview", *run, "--rows", "2")
    assert answer.out.count("── row ") == 2
    assert "Say [bold]it[/bold]" in answer.out
    assert re.search(r"⟦yes <\|end\|>⟧", answer.out)
    assert "line 3" not in answer.out
    page = tmp_path / "pages" / "rows.html"
    answer = leanft("data", "preview", *run, "--html", page, "data.packing=bfd")
    assert (answer.code, "⟦" in answer.out) == (0, False)
    assert page.read_text().count("── row ") == 3 + 1  # 3 documents and padding


FILES = {
    "messages": ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "finetune"),
    "prompt_completion": ({"prompt": "q", "completion": "a"}, "finetune"),
    "text": ({"text": "a"}, "finetune"),
    "preference": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "dpo"),
    "unpaired": ({"prompt": "q", "completion": "a", "label": True}, "kto"),
    "classification": ({"text": "a", "label": "good"}, "classify"),
    "classification, ": ({"text": "a", "labels": ["good", "bad"]}, "classify"),
    "prompts": ({"prompt": "q", "answer": "a"}, "grpo"),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("format", FILES)
def test_a_file_alone_is_shown_as_its_rows_are_trained(leanft, tmp_path, monkeypatch, format: str):
    monkeypatch.chdir(tmp_path)
    row, recipe = FILES[format]
    other = row | {"label": "bad"} if row.get("label") == "good" else row
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
    multi_label = ["data.multi_label=true"] if "labels" in row else []
    for verb in ("stats", "preview"):
        named = leanft("data", verb, recipe, "model.path=tiny", "data.source=rows.jsonl", *multi_label)
        alone = leanft("data", verb, "rows.jsonl")
        assert (alone.code, alone.out) == (0, named.out), alone.err
        assert format.rstrip(", ") in alone.out
        assert f"the recipe {recipe} reads" in alone.err and "add model.path=MODEL" in alone.err
    with_model = leanft("data", "preview", "rows.jsonl", "model.path=tiny", "data.max_bad_rows=3")
    assert with_model.code == 0 and "model.path=MODEL" not in with_model.err


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
SAID = {"role": "assistant", "content": "Red."}
ASKED = {"role": "user", "content": "Which color?"}
SHOWN = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which color?"}]}
EMBEDDED = {  # recipe, row, settings, the embedded model, what only it shows
    "a field of images": ("finetune", {"messages": [ASKED, SAID], "images": ["a.png"]}, [], "tiny-images", "[image "),
    "a renamed field": (
        "finetune",
        {"prompt": "q", "completion": "a", "photo": "a.png"},
        ["data.columns.images=photo"],
        "tiny-images",
        "[image ",
    ),
    "an image of a pair": ("dpo", {"prompt": [SHOWN], "images": ["a.png"], "chosen": "a", "rejected": "b"}, [],
        "tiny-images", "[image "),
    "an image of a prompt": ("grpo", {"prompt": [SHOWN], "images": ["a.png"]}, [], "tiny-images", "[image "),
    "tools": ("distill", {"messages": [ASKED, SAID], "tools": [TOOL]}, [], "tiny-tools",
        "<tools>"),
    "a call in JSON": ("finetune", {"messages": json.dumps([ASKED, CALL])}, [], "tiny-tools", "<tool_call>"),
    "tools of the run": ("ppo", {"prompt": "2 + 3"}, ["tools=[calculator]"], "tiny-tools", "arithmetic expression"),
    "texts": ("online_dpo", {"prompt": "2 + 3"}, [], "tiny", "<|user|>2 + 3"),
}  # fmt: skip


@pytest.mark.first(3)
@pytest.mark.parametrize("case", EMBEDDED)
def test_an_embedded_model_that_reads_the_rows_shows_them(leanft, tmp_path, monkeypatch, case: str):
    monkeypatch.chdir(tmp_path)
    recipe, row, settings, model, shown = EMBEDDED[case]
    Image.new("RGB", (8, 8), "red").save("a.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    answer = leanft.ok("data", "preview", recipe, "data.source=rows.jsonl", *settings)
    assert shown in answer.out
    assert f"those of model.path={model}" in answer.err
    named = leanft("data", "preview", recipe, "model.path=tiny", "data.source=rows.jsonl", *settings)
    assert (shown in named.out) == (model == "tiny"), named.out
    assert "those of model.path" not in named.err


@pytest.mark.long
def test_a_file_with_columns_a_preset_or_an_unreadable_name(leanft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("question,better,worse\nq,a,b\n")
    columns = [f"data.columns.{pair}" for pair in ("prompt=question", "chosen=better", "rejected=worse")]
    alone, of_preset = (leanft("data", "preview", "rows.csv", *columns, *preset) for preset in ([], ["-c", "tiny/dpo"]))
    assert "line 2, chosen: " in alone.out and "reads the rows" in alone.err
    assert "line 2, chosen: " in of_preset.out and "reads the rows" not in of_preset.err
    assert leanft("data", "preview", "dpo", "rows.csv", *columns).out == alone.out
    for word, message in {
        "none.csv": "data source none.csv does not exist",
        "finetun": "no recipe is called 'finetun'. Did you mean 'finetune'?",
        "rows.csv": "cannot detect the format from the fields question, better, worse",
    }.items():
        answer = leanft("data", "stats", word)
        assert (answer.code, message in answer.err) == (2, True), answer.err


def test_html_in_data_does_not_run(leanft, tmp_path):
    attack = (
        "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><a href=javascript:x>&lt;b&gt; [link=x]</span></pre>"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": attack}) + "\n")
    run = ["full_finetune_single_device", "model.path=tiny", f"data.source={tmp_path}/rows.jsonl"]
    page = tmp_path / "rows.html"
    leanft.ok("data", "preview", *run, "--html", page)
    tags = Tags()
    tags.feed(page.read_text())
    assert tags.seen <= {"html", "head", "meta", "title", "style", "body", "pre", "span"}
    assert tags.attributes <= {"lang", "charset", "content", "http-equiv", "class"}
    assert attack in tags.text


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_folder_where_the_run_would_write_is_not_needed_and_not_made(leanft, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    leanft.ok("data", "preview", *run, "-n", "1")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", ["grpo", "ppo", "online_dpo"])
def test_prompts_and_their_columns(leanft, run, tmp_path, recipe: str):
    rows = [{"prompt": "Say it", "answer": 4}, {"prompt": "word " * 90, "level": "hard"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [recipe, *run[1:3], "data.max_prompt_length=60", "rewards=[mine.py:score]"]
    answer = leanft.quiet("data", "preview", *settings)
    assert (
        "rows.jsonl, line 1: 8 tokens, 0 trained\n<|begin|><|user|>Say it<|end|><|assistant|>\nanswer: 4\n"
        in answer.out
    )
    assert (
        "from 2 rows (prompts); 1 dropped (longer than max_prompt_length); columns for rewards: answer, "
        "level; 1 prompt, 8 tokens\n" in answer.out
    )
    answer = leanft.quiet("data", "stats", *settings)
    assert (
        "2 rows (prompts); columns for rewards: answer, level; 2 prompts" in answer.out
        and "1 longer than max_prompt_length=60, which a run drops" in answer.out
    )
    assert re.search(r"tokens per row, at most: 5% 8, .*100% \d\d+\n", answer.out)
    answer = leanft("data", "stats", *settings, "--peak")
    assert (answer.code, "--peak predicts steps" in answer.err) == (2, True)


def test_labels_of_texts(leanft, tmp_path):
    rows = [{"text": "a", "labels": [1, 0, 1]}, {"text": "b", "labels": [0, 0, 0]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["classify", "model.path=tiny", f"data.source={tmp_path}/rows.jsonl", "data.multi_label=true"]
    answer = leanft("data", "preview", *settings, "data.labels=[damage,money,time]")
    assert "line 1, damage, time: " in answer.out
    assert "line 2, no label: " in answer.out


@pytest.mark.first(1)
@pytest.mark.parametrize(("good", "bad"), [(2, 0), (2, 1), (0, 2)])
def test_kto_counts_good_and_bad_answers(leanft, run, tmp_path, good: int, bad: int):
    rows = [{"prompt": f"Say {i}", "completion": "yes", "label": i < good} for i in range(good + bad)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = leanft("data", "stats", "kto", *run[1:])
    assert f"{good} desirable and {bad} undesirable" in answer.out
    missing = "undesirable" if not bad else "desirable"
    assert (f"WARNING: no answer is {missing}" in answer.out) == (not good or not bad)
    batches, held_out = prepare_batches(
        UnpairedDataConfig(source=f"{tmp_path}/rows.jsonl", validation_source=f"{tmp_path}/rows.jsonl"),
        load_tokenizer("tiny"),
        batch_size=1,
        seed=0,
    )
    assert held_out is not None
    assert all(f"{good} desirable and {bad} undesirable" in str(one.report) for one in (batches, held_out))


TOOLS = '''
def search(word: str) -> str:
    """Search.

    Args:
        word: What to find.
    """
    raise SystemExit("a preview calls no tool")


class Env:
    def reset(self, **row):
        raise SystemExit("a preview resets no environment")

    def look(self, place: str) -> str:
        """Look.

        Args:
            place: Where to look.
        """


class Steps:
    def reset(self, row):
        raise SystemExit("a preview resets no environment")

    def step(self, action):
        return "", 0.0, True
'''


GIVEN = {
    "both": (["environment=tools.py:Env", "tools=[tools.py:search]"], 2),
    "neither": ([], 0),
    "tools": (["tools=[tools.py:search]"], 1),
    "steps": (["environment=tools.py:Steps"], 0),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", ["grpo", "ppo", "online_dpo"])
@pytest.mark.parametrize("what", GIVEN)
def test_prompts_have_the_tools_of_the_run(leanft, tmp_path, monkeypatch, recipe: str, what: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    rows = [{"prompt": f"Work out {number}."} for number in (2, 33, 444)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = [recipe, "model.path=tiny-tools", "data.source=rows.jsonl", "rewards=[length]"]
    theirs = AutoTokenizer.from_pretrained(resolve_model_path("tiny-tools"))
    spec: dict[str, Any] = {}
    exec(TOOLS, spec)  # its functions, whose schemas transformers makes
    given, number = GIVEN[what]
    functions = [spec["search"], spec["Env"]().look][:number]
    lengths = [
        len(theirs.apply_chat_template(messages, tools=functions or None, add_generation_prompt=True)["input_ids"])
        for messages in ([{"role": "user", "content": row["prompt"]}] for row in rows)
    ]
    answer = leanft.ok("data", "stats", *run, *given, f"data.max_prompt_length={max(lengths) - 1}")
    assert f"3 prompts, {sum(lengths):,} tokens" in answer.out
    assert f"1 longer than max_prompt_length={max(lengths) - 1}, which a run drops" in answer.out
    assert ("is not reset here" in answer.err) == ("environment" in "".join(given))
    answer = leanft.ok("data", "preview", *run, *given)
    assert all(name in answer.out for name in (f"line 1: {lengths[0]} tokens", *(one.__name__ for one in functions)))
