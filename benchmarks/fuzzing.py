"""Feeds broken input to everything that reads a file somebody else may have written.

    python benchmarks/fuzzing.py                        # 140,000 cases, as many as fit into ten minutes
    python benchmarks/fuzzing.py --cases 2000 --only config.json

Each case is a valid input with a few things broken: a value of its JSON or YAML replaced by a hostile one (a huge number,
deep nesting, half a surrogate pair, another type), taken out or doubled, or bytes turned, cut, repeated or put in. Whole
inputs are small, so a failing one needs no shrinking and none of hypothesis' cost a case. Cases are counted by target and
seed: a run with the same arguments feeds the same ones.

A case passes that is read, or refused by a message of ours (a ValueError, exit code 2). It fails with any other
exception, after 10 seconds of processor time, or where it asks for 1 GiB more memory. A worker that dies or no longer
answers is itself a failure, and the case that it had is known.

Writes `results/fuzzing_<hardware>.json`.
"""

import json
import os
import random
import re
import resource
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from results import RESULTS, ROOT, print_result, require_hardware, write_result
from tiny_runs import CONFIG, recipe, write_inputs

from lean_ft.cli.errors import explain
from lean_ft.data.formats import RowReader
from lean_ft.data.text_files import read_text_file
from lean_ft.models import load_model
from lean_ft.models.safetensors_file import read_header, write_file
from lean_ft.settings import SFTDataConfig
from lean_ft.settings_text import load_config
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.checkpoint import RANDOM_STATE_FILE, TRAINING_STATE_FILE, check_whole, read_training_state

CASE_CPU_SECONDS = 10.0
CASE_MEMORY_BYTES = 2**30
WORKER_SILENCE_SECONDS = 120.0  # of the clock: a machine may be busy
CASES_A_WORKER = 500
COLUMNS = ["input", "cases", "read", "refused with a message", "failed", "slowest", "cases a second"]
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
]
TEMPLATE = (
    "{% macro f(x) %}{{ x | tojson }}{% endmacro %}{{ f([1, 2]) }}{% for i in range(3) %}{{ i }}{% endfor %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'system' %}<<{{ message.content | trim }}>>"
    "{% elif loop.first %}first {% endif %}{% set name = message.role ~ ':' %}{{ name.upper() }}{{ message['content'] }}"
    "{{ '\\n' * 2 }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
HOSTILE = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**40, -(2**63), 1e308, -1e308, 1e-320, 0.5, float("nan")),
    *(float("inf"), "", "x", "\ud800", "\x00", "../../etc/passwd", "/etc/passwd", "é" * 9, "A" * 100_000, "1", "true"),
    *([], {}, [[]], [None], {"": {}}, {"a": [1]}, [0] * 5000, ["x"], {"role": "user", "content": None}),
]
SNIPPETS = [
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"&a *a", b"!!python/object/apply:os.system [id]", b"{{", b"}}", b"{%"),
    *(b"[" * 2000, b'{"a":' * 2000, b"{% for i in range(10**9) %}", b"{{ 'a' * 10**10 }}", b"{{ ''.__class__ }}"),
    *(
        b"1e999",
        b"-",
        b": ",
        b"\n",
        b"\t",
        b"<<: *a",
        b'"',
        b"'",
        b"\\",
        b"\\ud800",
        b"NaN",
        b"9" * 5000,
        b"#",
        b"---\n",
    ),
]


# Making cases ---------------------------------------------------------------------------------------------------------


def break_bytes(content: bytes, chance: random.Random) -> bytes:
    """A few bytes turned, cut, repeated or put in."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        place = chance.randrange(len(content) + 1)
        end = min(len(content), place + chance.choice((1, 2, 5, 40)))
        act = chance.randrange(5)
        if act == 0 and place < len(content):
            turned = content[place] ^ 1 << chance.randrange(8)
            content = content[:place] + bytes([turned]) + content[place + 1 :]
        elif act == 1:
            content = content[:place] + content[end:]
        elif act == 2:
            content = content[:place] + content[place:end] * chance.choice((2, 3, 50)) + content[end:]
        elif act == 3:
            content = content[:place] + chance.choice(SNIPPETS) + content[place:]
        elif chance.random() < 0.3:
            content = content[:place]
    return content


def break_value(value: Any, chance: random.Random) -> Any:
    """A copy of a JSON value with something inside of it replaced, taken out, doubled or buried."""
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = chance.choice(keys)
        act = chance.random()
        if act < 0.12:
            return (
                {k: value[k] for k in keys if k != key} if isinstance(value, dict) else value[:key] + value[key + 1 :]
            )
        if act < 0.16:
            if isinstance(value, dict):
                return {**value, str(chance.choice(keys)) + "x": value[key]}
            return [*value, value[key]]
        changed = dict(value) if isinstance(value, dict) else list(value)
        changed[key] = break_value(value[key], chance)
        return changed
    if chance.random() < 0.03:
        deep: Any = value
        for _ in range(chance.choice((20, 900, 5000))):
            deep = [deep]
        return deep
    if isinstance(value, int | float) and not isinstance(value, bool) and chance.random() < 0.4:
        return value * chance.choice((-1, 2, 3, 10**6, 10**15, 0.5)) + chance.choice((0, 0, 1, -1))
    return chance.choice(HOSTILE)


def as_json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b"[" * 5000 + b"]" * 5000


def break_json(content: bytes, chance: random.Random) -> bytes:
    """Mostly its values, else its bytes."""
    if chance.random() < 0.3:
        return break_bytes(content, chance)
    value = json.loads(content)
    for _ in range(chance.choice((1, 1, 2, 3))):
        value = break_value(value, chance)
    return as_json(value)


def break_yaml(content: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return break_bytes(content, chance)
    value = break_value(yaml.safe_load(content), chance)
    try:
        return yaml.safe_dump(value, allow_unicode=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    except (RecursionError, yaml.YAMLError):
        return b"[" * 5000


def break_safetensors(content: bytes, chance: random.Random) -> bytes:
    """The header's values, its bytes, its length, or the whole."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    act = chance.random()
    if act < 0.6:
        header = break_json(header, chance)
        length = len(header)
    elif act < 0.7:
        length = chance.choice((0, 1, length - 1, length + 1, 2**20, 2**40, 2**63, 2**64 - 1))
    else:
        return break_bytes(content, chance)
    return struct.pack("<Q", length) + header + data


# Feeding them ---------------------------------------------------------------------------------------------------------


class Target:
    """A file that is broken, and what reads it."""

    def __init__(
        self,
        seeds: list[bytes],
        breaks: Callable[[bytes, random.Random], bytes],
        file: Path,
        read: Callable[[], object],
    ):
        self.seeds, self.breaks, self.file, self.read = seeds, breaks, file, read

    def case(self, name: str, seed: int, number: int) -> bytes:
        chance = random.Random(f"{name} {seed} {number}")
        return self.breaks(chance.choice(self.seeds), chance)


def targets(folder: Path) -> dict[str, Target]:
    """Everything that is fed, with valid files to begin from under `folder`."""
    inputs = write_inputs(folder / "model")
    model = load_model(inputs, random_init=True)
    write_file(inputs / "model.safetensors", {n: p.detach() for n, p in model.named_parameters()}, {"format": "pt"})
    tokenizer = load_tokenizer(inputs)
    found: dict[str, Target] = {}

    presets = [p.read_bytes() for p in sorted((ROOT / "configs").rglob("*.yaml"))]
    settings = folder / "settings.yaml"
    read_preset = lambda: load_config(recipe.Config, settings, ["output_dir=x"])  # noqa: E731
    found["settings YAML"] = Target(presets, break_yaml, settings, read_preset)

    overrides = folder / "overrides"
    lines = b"batch_size=4\nmodel.path=x\noutput_dir=runs/a\noptimizer.betas=[0.9, 0.99]\ndata.source=[a, b]\n"
    lines += (
        b"optimizer.lr=1e-5\ndata.columns.prompt=question\nsave_async=true\nclip_grad_norm=null\ndata.source=a.jsonl"
    )

    def read_overrides() -> None:
        text = overrides.read_bytes().decode("utf-8", "surrogateescape")  # as sys.argv is
        load_config(recipe.Config, None, text.split("\n"))

    found["settings on the command line"] = Target([lines], break_bytes, overrides, read_overrides)

    rows = folder / "rows.jsonl"
    chats: list[Any] = [
        {"messages": MESSAGES},
        {"prompt": "What?", "completion": "That."},
        {"prompt": MESSAGES[:2], "completion": MESSAGES[2:]},
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"text": "Once upon a time."},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {
            "name": "f", "arguments": "{\"a\": 1}"}}]}], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ]  # fmt: skip
    template = folder / "templated"
    write_inputs(template)
    (template / "chat_template.jinja").write_text(TEMPLATE)
    templated = load_tokenizer(template)

    def read_data() -> None:
        read = list(read_text_file(rows, None))
        config = SFTDataConfig(source=str(rows))
        for one in (tokenizer, templated):
            reader = RowReader.of(config, read, one)
            for row in read:
                reader.passage(row)

    found["rows of JSONL"] = Target([as_json(row) + b"\n" for row in chats], break_json, rows, read_data)

    families = [CONFIG]
    for name in ("llama", "mistral", "gemma2", "gemma3_text", "phi3", "qwen3", "qwen3_moe", "mixtral"):
        more: dict[str, Any] = {"model_type": name, "architectures": [name], "head_dim": 8, "sliding_window": 8}
        more |= {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        more |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "query_pre_attn_scalar": 8, "pad_token_id": 0}
        families.append({**CONFIG, **more})
    read_model = lambda: load_model(inputs)  # noqa: E731
    found["config.json"] = Target([as_json(c) for c in families], break_json, inputs / "config.json", read_model)

    broken = folder / "broken.safetensors"
    weights = (inputs / "model.safetensors").read_bytes()
    found["safetensors header"] = Target([weights], break_safetensors, broken, lambda: _read_tensors(broken))

    for name in ("tokenizer.json", "tokenizer_config.json"):
        own = folder / f"for_{name}"
        write_inputs(own)
        config = {"eos_token": "<end>", "add_bos_token": False, "chat_template": TEMPLATE, "model_max_length": 64}
        config |= {"added_tokens_decoder": {"256": {"content": "<end>", "special": True}}}
        seed = (own / name).read_bytes() if name == "tokenizer.json" else as_json(config)
        if name == "tokenizer.json":
            seed = as_json(_smaller(json.loads(seed)))

        def read_tokenizer(own: Path = own) -> None:
            loaded = load_tokenizer(own)
            loaded.decode(loaded.encode("2 times 2 is <end>"))

        found[name] = Target([seed], break_json, own / name, read_tokenizer)

    jinja = folder / "for_templates"
    write_inputs(jinja)

    def render() -> None:
        load_tokenizer(jinja).render(MESSAGES)

    found["chat template"] = Target([TEMPLATE.encode()], break_bytes, jinja / "chat_template.jinja", render)

    checkpoint = folder / "step_00000004"
    (checkpoint / "training_state").mkdir(parents=True)
    state = {"format": 1, "step": 4, "total_steps": 9, "recipe": "r", "settings": {"a": 1}, "data_fingerprint": "f"}
    state |= {"batches": {"epoch": 0}, "scaler": None}
    read_state = lambda: read_training_state(checkpoint)  # noqa: E731
    found["training_state.json"] = Target([as_json(state)], break_json, checkpoint / TRAINING_STATE_FILE, read_state)
    entry = {"bytes": 3, "sha256": "ab"}
    files = dict.fromkeys((TRAINING_STATE_FILE, RANDOM_STATE_FILE, "training_state/optimizer.safetensors"), entry)
    manifest = {"format": 1, "step": 4, "files": files, "sha256": "cd"}
    check = lambda: check_whole(checkpoint)  # noqa: E731
    found["manifest.json"] = Target([as_json(manifest)], break_json, checkpoint / "manifest.json", check)
    # The slow ones last: they may have all the time that the others leave.
    slow = ["tokenizer_config.json", "chat template", "settings on the command line", "settings YAML"]
    return {
        name: found[name]
        for name in sorted(found, key=lambda name: (name in slow, slow.index(name) if name in slow else 0))
    }


def _read_tensors(file: Path) -> None:
    """Every tensor that the header promises, as a model would: into memory of its shape."""
    for tensor in read_header(file).values():
        if tensor.dtype is not None:
            tensor.read()


def _smaller(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Without most of its vocabulary, so that what is broken is seldom a character's number."""
    vocabulary = tokenizer["model"]["vocab"]
    kept = {token: number for token, number in vocabulary.items() if token.isalnum() or token == "<end>"}
    return {**tokenizer, "model": {**tokenizer["model"], "vocab": kept}}


class _OutOfTime(BaseException):
    pass


def judge(target: Target, content: bytes) -> tuple[str, dict[str, Any] | None]:
    """`read`, `refused`, or `failed` with what is known of it."""
    target.file.write_bytes(content)

    def ring(number: int, frame: Any) -> None:
        raise _OutOfTime

    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, CASE_CPU_SECONDS)
    try:
        target.read()
    except _OutOfTime as error:
        return "failed", _failure(f"took more than {CASE_CPU_SECONDS:.0f} s of processor time", error)
    except BaseException as error:  # a panic of Rust code is one
        message, code = explain(error)
        if isinstance(error, Exception) and code == 2:
            return "refused", None
        return "failed", _failure(f"{type(error).__name__}: {message[:200]}", error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "read", None


def _failure(what: str, error: BaseException) -> dict[str, Any]:
    ours = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}lean_ft{os.sep}" in f.filename]
    last = ours[-1] if ours else None
    return {"what": what, "where": f"{Path(last.filename).relative_to(ROOT)}:{last.lineno}" if last else None}


def worker(target: Target, name: str, seed: int, numbers: range, current: Path, answer: Path) -> None:
    """Judge the cases with these numbers, and write what came of them."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + CASE_MEMORY_BYTES, resource.RLIM_INFINITY))
    counts, failures, slowest = {"read": 0, "refused": 0, "failed": 0}, [], 0.0
    for number in numbers:
        current.write_text(str(number))
        content = target.case(name, seed, number)
        began = time.process_time()
        outcome, failure = judge(target, content)
        slowest = max(slowest, time.process_time() - began)
        counts[outcome] += 1
        if failure is not None:
            failures.append({"case": number, **failure, "input": repr(content[:300])})
    answer.write_text(json.dumps({"counts": counts, "failures": failures, "slowest": slowest}))


def feed(target: Target, name: str, seed: int, first: int, cases: int, deadline: float, place: Path) -> dict[str, Any]:
    """All cases of one target from number `first` on, some hundreds in a process at a time."""
    row: dict[str, Any] = {
        "label": name,
        "status": "ok",
        "reason": None,
        "cases": 0,
        "read": 0,
        "refused": 0,
        "failed": 0,
    }
    row |= {"slowest_seconds": 0.0, "seconds": 0.0, "failures": []}
    current, answer = place / "current", place / "answer"
    original = target.file.read_bytes() if target.file.exists() else None
    began = time.perf_counter()
    number, cases = first, first + cases
    while number < cases and time.perf_counter() < deadline:
        numbers = range(number, min(cases, number + CASES_A_WORKER))
        answer.unlink(missing_ok=True)
        process = os.fork()
        if not process:
            try:
                worker(target, name, seed, numbers, current, answer)
            finally:
                os._exit(0)
        ended = _wait(process, current)
        if answer.exists():
            told = json.loads(answer.read_text())
            row["cases"] += len(numbers)
            number = numbers.stop
            for outcome, count in told["counts"].items():
                row[outcome] += count
            row["failures"] += told["failures"]
            row["slowest_seconds"] = max(row["slowest_seconds"], told["slowest"])
            continue
        last = int(current.read_text())  # what it did before is counted as one lost with it
        row["cases"] += 1
        row["failed"] += 1
        row["failures"].append(
            {"case": last, "what": ended, "where": None, "input": repr(target.case(name, seed, last)[:300])}
        )
        number = last + 1
    if original is not None:
        target.file.write_bytes(original)
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def added(before: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row of two sittings."""
    sums = {key: before[key] + row[key] for key in ("cases", "read", "refused", "failed", "seconds", "failures")}
    return {**row, **sums, "slowest_seconds": max(before["slowest_seconds"], row["slowest_seconds"])}


def _wait(process: int, current: Path) -> str:
    """How a worker ended; one that stays with a case for too long is killed."""
    before, since = "", time.perf_counter()
    while not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.02)
        now = current.read_text() if current.exists() else ""
        if now != before:
            before, since = now, time.perf_counter()
        elif time.perf_counter() - since > WORKER_SILENCE_SECONDS:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return f"did not come back within {WORKER_SILENCE_SECONDS:.0f} s"
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return f"the process ended with {signal.Signals(-code).name if code < 0 else code}"


def describe(result: dict[str, Any]) -> str:
    """What the table is of."""
    cases = sum(row["cases"] for row in result["rows"])
    failed = sum(row["failed"] for row in result["rows"])
    return f"{cases:,} broken inputs, of which {failed or 'none'} failed"


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The table's text."""
    return [
        [
            row["label"],
            f"{row['cases']:,}",
            f"{row['read']:,}",
            f"{row['refused']:,}",
            f"{row['failed']:,}",
            f"{row['slowest_seconds']:.2f} s",
            f"{row['cases'] / max(row['seconds'], 1e-3):,.0f}",
        ]
        for row in result["rows"]
    ]


def main(
    cases: Annotated[int, typer.Option(help="Cases in all, the same number for each input.")] = 140_000,
    budget_seconds: Annotated[
        float, typer.Option(help="Shared out evenly, what is left over going to those behind.")
    ] = 600.0,
    only: Annotated[str, typer.Option(help="A pattern for the inputs to feed.")] = "",
    seed: Annotated[int, typer.Option(help="Another one makes other cases.")] = 0,
    more: Annotated[bool, typer.Option(help="Go on behind the cases of the result there is, and add to it.")] = False,
    results_dir: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULTS,
) -> None:
    """Feeds, prints and writes; exits with 1 where a case failed."""
    hardware = require_hardware("cpu")
    earlier: dict[str, Any] = {}
    if more:
        before = json.loads((results_dir / f"fuzzing_{hardware.slug}.json").read_text())
        if before["settings"]["seed"] != seed:
            raise typer.BadParameter(
                f"the result there is has the seed {before['settings']['seed']}", param_hint="--seed"
            )
        earlier = {row["label"]: row for row in before["rows"]}
    with tempfile.TemporaryDirectory(prefix="lean_ft_fuzzing_") as folder:
        chosen = {name: target for name, target in targets(Path(folder)).items() if re.search(only, name)}
        if not chosen:
            raise typer.BadParameter("no input has a name like that", param_hint="--only")
        rows = []
        started = time.perf_counter()
        for index, (name, target) in enumerate(chosen.items(), 1):
            deadline = started + budget_seconds * index / len(chosen)
            first = earlier.get(name, {}).get("cases", 0)
            row = feed(target, name, seed, first, cases // len(chosen), deadline, Path(folder))
            rows.append(added(earlier.pop(name), row) if name in earlier else row)
    rows += earlier.values()
    path = write_result(
        "fuzzing",
        benchmark="fuzzing",
        hardware=hardware,
        settings={"cases": cases, "seed": seed, "case_cpu_seconds": CASE_CPU_SECONDS, "case_memory": CASE_MEMORY_BYTES},
        rows=[{**row, "failures": row["failures"][:20]} for row in rows],
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)
    for row in rows:
        kinds: dict[str, list[Any]] = {}
        for failure in row["failures"]:
            kinds.setdefault(f"{failure['what'][:90]} at {failure['where']}", []).append(failure)
        for what, failures in kinds.items():
            print(
                f"{row['label']}: {len(failures)} x {what}, such as case {failures[0]['case']}: {failures[0]['input'][:160]}"
            )
    raise typer.Exit(1 if any(row["failed"] for row in rows) else 0)


if __name__ == "__main__":
    typer.run(main)
