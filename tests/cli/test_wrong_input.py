"""Wrong input of every verb: exit code 2, one message on stderr, no traceback, and no file written."""

import shlex

import pytest

METRICS = '{"step": 1, "loss": 2.0, "tokens": 8, "step_seconds": 1.0}\n'
KEEP = "score tiny tiny/validation.jsonl"
DISTILL = "validate distill --config tiny/distill device=cpu"
PLAN = "--config tiny/full data.max_length=64 --device-name H100"
# The command, and parts of its message. The current directory has a run `a` and nothing else.
WITH_SHIPPED_RECIPES = [
    ("check no/such/folder", "no/such/folder"),
    (
        "check tiny --config tiny/dpo",
        "is for the recipe dpo. Pass a preset for finetune or full_finetune_single_device",
    ),
    ("check tiny model.path=tiny", "model.path cannot be set: MODEL is tiny"),
    ("check tiny --fast", "has no option --fast"),
    ("run finetune --model tiny --lora_r=8", "no options --model, --lora_r.", "model.path=tiny", "lora.rank=8"),
    ("run finetune model.path=tiny a/metrics.jsonl", "key=value. Did you mean 'data.source=a/metrics.jsonl'?"),
    ("run finetune model=tiny data=rows.jsonl", "2 problems", "'model.path=tiny'", "'data.source=rows.jsonl'"),
    ("score tinny tiny/validation.jsonl", "does not exist. Did you mean 'tiny'?"),
    ("data example dpo", "dpo is a recipe. Its formats are preference."),
    ("data preview --config tiny/full data.source=missing.jsonl", "missing.jsonl does not exist"),
    ("data preview --config tiny/full --rows 0", "--rows"),
    ("export tyni out", "does not exist"),
    ("export a out", "a has neither a config.json (a model or checkpoint) nor step_* folders"),
    ("validate finetune model.path=tiny rows.csv.gz", "expected key=value. Did you mean 'data.source=rows.csv.gz'?"),
    ("validate finetune --config tiny/full optimizer.name=rule.py", "Did you mean 'optimizer.name=rule.py:Rule'?"),
    ("validate finetune --config tiny/full optimizer.name=rule.py:Ruler", "rule.py has no class or function Ruler; it"),
    ("export tiny out --dtype int8", "dtype is int8; expected float32, bfloat16 or float16"),
    ("export tiny out --max-shard-size 5", "is '5'; expected a number and a unit: 24GiB, 5GB, 800MB."),
    ("export tiny out.gguf --gguf f32 --dtype float32", "--gguf cannot be combined with --dtype"),
    ("export tiny out --gguf f32", "expected a name that ends in .gguf"),
    ("export tiny out --ollama", "--ollama is only used with --gguf"),
    ("export tiny out --shard-size 1GB", "no option --shard-size. Did you mean '--max-shard-size'?"),
    ("export tiny", "DEST"),
    (f"plan finetune --nodes 2 {PLAN}", "--nodes 2 needs --gpus N"),
    (f"plan finetune gradient_accumulation_steps=1 --gpus 2 {PLAN}", "=1 counts the batches of a step over all"),
    ("plot nowhere", "nowhere has no metrics.jsonl. Expected the output_dir of a run"),
    ("plot a -o nowhere/x", "--output nowhere/x: no such folder: nowhere"),
    ("runs nowhere", "no such folder: nowhere"),
    (f"{KEEP} b c --top-k 8", "expected one DEST"),
    (f"{KEEP} --top-k 8", "--top-k needs DEST"),
    (f"{KEEP} data.max_length=8 --top-k 8", "--top-k needs DEST"),
    (f"{KEEP} kept --top-k 0", "expected whole number > 0"),
    (f"{KEEP} kept --top-k 8 data.max_lenght=8", "Did you mean 'data.max_length'"),
    (f"{KEEP} kept --top-k 8 --force", "cannot be combined with --per-token or --force"),
    (f"{KEEP} a --top-k 8", "already exists"),
    (f"{DISTILL} distill.teacher=null", "found neither"),
]
REPEATING = [
    ("check tiny --config tiny/none", "tiny/none"),
    ("check tiny optimizer.nam=adamw", "Did you mean 'optimizer.name'"),
    ("check tiny memory.tile_mlp=many", "memory.tile_mlp"),
    ("check tiny data.source=none.jsonl", "none.jsonl"),
    ("data stats --config tiny/full data.max_lenght=3", "data.max_length"),
    ("data stats generate model.path=tiny prompt=x", "has no `data`"),
    (f"plan full_finetune_single_device --gpus 2 {PLAN}", "has no `parallel` settings, so it runs on one device"),
    (f"{KEEP} kept --top-k 9000", "top_k is 9000; expected 1 to 768"),
    (f"{DISTILL} distill.teacher=./none", "./none"),
    (f"{DISTILL} distill.on_policy=0.5 data.packing=bfd", "samples completions of unknown length"),
    (f"{DISTILL} distill.teacher=null distill.cached=a", "is not a folder of a teacher's predictions"),
]
WITH_TOY_RECIPES = [
    ("rnu", "no such command 'rnu'", "'run'", "leanft --help"),
    ("--verison", "leanft has no option --verison", "Did you mean '--version'?"),
    ("train model.path=tiny", "no such command 'train'", "leanft run finetune"),
    ("merge_lora runs/a b", "no such command 'merge_lora'. Run `leanft export RUN FOLDER --merge`."),
    ("resume runs/a", "a run resumes if you run the same command again"),
    ("run sft model.path=tiny", "no recipe is called 'sft'. Run `leanft run finetune`."),
    ("cp qlora .", "no recipe is called 'qlora'. Run `leanft run finetune lora.rank=16 lora.quantize=nf4`."),
    ("toy_singledevice", "no such command 'toy_singledevice'. Did you mean 'toy_single_device'?"),
    ("run finetune --config tiny/full -c tiny/lora", "--config is given more than once", "into one file"),
    ("cat tiny/toy --schema", "tiny/toy"),
    ("cat nothing_like_it", "nothing_like_it"),
    ("cat tiny", "tiny"),
    ("cp toy_single_device", "missing argument 'DEST'", "leanft cp --help"),
    ("cp tiny/tpy .", "Did you mean 'tiny/toy'?"),
    ("cp toy_singledevice .", "Did you mean 'toy_single_device'?"),
    ("cp tiny/toy a/metrics.jsonl/mine.yaml", "a/metrics.jsonl"),
    ("env extra", "extra", "leanft env --help"),
    ("ls othr", "Did you mean 'other'?"),
    ("run", "expected a RECIPE: there is no --config that names one", "leanft ls"),
    ("run toy_single_device --confg x", "Did you mean '--config'?"),
    ("run toy_single_device --config", "--config", "requires an argument"),
    ("run toy_single_device --batch_size 3", "Settings take no dashes: batch_size=3"),
    ("run toy_single_device --learning-rate=1e-4", "Settings take no dashes: optimizer.lr=1e-4"),
    ("run toy_single_device --lr --config x", "Settings take no dashes: optimizer.lr=VALUE"),
    ("run toy_single_devise", "no recipe is called 'toy_single_devise'", "Did you mean 'toy_single_device'?"),
    ("run toy", "Did you mean 'toy_single_device'?"),
    ("run mine/toy.py", "no such file: mine/toy.py"),
    ("run toy_single_device.py", "no such file", "Did you mean 'toy_single_device'?"),
    ("run tiny/toy", "tiny/toy does not name one (`recipe: NAME`). Name it: leanft run RECIPE --config tiny/toy."),
    ("run batch_size=3", "expected the recipe before any key=value, found 'batch_size=3'"),
    ("run toy_single_device -c tiny/toi", "no preset is called 'tiny/toi'", "Did you mean 'tiny/toy'?"),
    ("run toy_single_device -c none.yaml", "no such file: none.yaml"),
    ("run toy_single_device -c toy_single_device", "no preset is called 'toy_single_device'"),
    ("run toy_single_device -c tiny/toy batchsize=3", "Did you mean 'batch_size'?"),
    ("run toy_single_device -c tiny/toy batch_size=x", "expected whole number > 0, found 'x'"),
    ("run toy_single_device -c tiny/toy m stray", "'stray': expected key=value"),
    ("run toy_single_device", "model.path", "a required setting is missing"),
    ("toy_single_device m n", "expected key=value"),
    ("toy_single_device m model.path=n", "expected key=value"),
]


@pytest.fixture
def refused(leanft, tmp_path, monkeypatch):
    """Return a function that checks that a command is refused, with these parts in its message."""
    folder = tmp_path / "here"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "metrics.jsonl").write_text(METRICS)
    (folder / "rule.py").write_text("class Rule:\n    pass\n")
    monkeypatch.chdir(folder)

    def check(command: str, *parts: str) -> None:
        refusal = leanft.refused(*shlex.split(command))
        assert "error: " in refusal and "Traceback" not in refusal
        for part in parts:
            assert part in refusal
        assert {path.name for path in folder.rglob("*")} == {"a", "metrics.jsonl", "rule.py"}

    return check


@pytest.mark.first(len(WITH_SHIPPED_RECIPES))
@pytest.mark.parametrize("case", WITH_SHIPPED_RECIPES + REPEATING, ids=lambda case: case[0])
def test_wrong_input_with_the_shipped_recipes(refused, case):
    refused(*case)


@pytest.mark.parametrize("case", WITH_TOY_RECIPES, ids=lambda case: case[0])
def test_wrong_input_with_toy_recipes(refused, shipped, case):
    refused(*case)
