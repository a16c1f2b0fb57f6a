"""`leanft plan`: progress, results and picture."""

import re

import pytest

from lean_ft.plan import picture, search
from lean_ft.plan.rehearsal import Rehearsal
from lean_ft.plan.result import EngineRound, Peak
from lean_ft.system.units import GIB


@pytest.mark.usefixtures("plans")
def test_progress_is_printed_and_a_budget_that_nothing_fits(leanft):
    answer = leanft.ok(
        *("plan", "--config", "tiny/full", "device=cpu", "data.max_length=64", "batch_size=2", "--budget", "1MiB")
    )
    assert "885,888 parameters, 128 tokens a step, planned for cpu in " in answer.out
    assert "no settings fit 1.0 MiB" in answer.out
    first, *others = answer.err.splitlines()  # without a terminal, one line per message
    assert first == "simulating a step on shapes"
    assert any("optimizer.name=adamw_8bit" in line for line in others)
    told = r"simulating [a-z_.]+=[a-z0-9_]+"
    # Libraries may write to stderr too, from threads of earlier tests.
    assert [line for line in others if "simulating" in line and not re.match(told, line)] == []


@pytest.mark.usefixtures("plans")
def test_of_a_gpu_it_tells_what_the_allocator_reserves_and_what_the_driver_takes(leanft):
    answer = leanft.ok("plan", "--config", "tiny/full", "data.max_length=64", "--device-name", "RTX 4090")
    reserved = re.search(r"reserved by the allocator: ([\d.]+ [MG]iB), plus the driver's context", answer.out)
    assert "\nsettings that fit 23.50 GiB (0.50 GiB kept for the driver), fastest first:\n" in answer.out
    first = next(line for line in answer.out.splitlines() if line.startswith("  *"))
    assert reserved is not None and reserved[1] in first
    assert re.search(r"\n +peak +reserved +speed  overrides\n", answer.out)


@pytest.mark.usefixtures("plans")
def test_adapters_are_listed_and_the_same_plan_is_not_made_again(leanft, monkeypatch):
    command = ("plan", "--config", "tiny/full", "data.max_length=48", "--device-name", "RTX 4090")
    first = leanft.ok(*command)
    table = first.out.partition("with an adapter instead")[2]
    assert re.search(r"\nLoRA +yes .* finetune lora\.rank=16\n", table)
    assert re.search(r"\nQLoRA +yes .* finetune lora\.rank=16 lora\.quantize=nf4\n", table)
    monkeypatch.setattr("lean_ft.plan.rehearsal.rehearse", None)
    again = leanft.ok(*command)
    assert again.out.partition(" in ")[2].partition("\n")[2] == first.out.partition(" in ")[2].partition("\n")[2]


@pytest.mark.usefixtures("plans")
def test_the_answer_for_the_given_settings_comes_before_the_search(leanft, monkeypatch):
    def fails(*arguments, **named):
        raise ValueError("the search began")

    monkeypatch.setattr(search, "search", fails)
    answer = leanft("plan", "--config", "tiny/full", "device=cpu", "data.max_length=64", "--budget", "1GiB")
    assert "the search began" in answer.err
    assert re.search(r"\npeak .*\n(.*\n)+budget 1.00 GiB: the given settings fit, with [\d.]+ GiB left", answer.out)


def test_a_line_that_needs_values_is_named(leanft, tmp_path):
    leanft.ok("cp", "full_finetune_single_device", f"{tmp_path}/mine.py")
    text, line = (tmp_path / "mine.py").read_text(), "picked = batch.labels[batch.labels != -100]"
    before, loss, after = text.partition("            loss = cross_entropy")
    (tmp_path / "mine.py").write_text(f"{before}            {line}\n{loss}{after}")
    number = before.count("\n") + 1
    refusal = leanft.refused("plan", f"{tmp_path}/mine.py", "--config", "tiny/full", "device=cpu")
    assert f"mine.py, line {number}: `{line}` cannot be simulated (DynamicOutputShapeException" in refusal
    assert "torch.where" in refusal and "Traceback" not in refusal


@pytest.mark.long
def test_the_picture_is_drawn(tmp_path):
    timeline = [(0.0, {"weights": GIB}), (1.0, {"weights": GIB, "loss": GIB, "batch": 10}), (2.0, {"weights": GIB})]
    rehearsal = Rehearsal(Peak("loss", timeline[1][1]), 2.0, 8, 4, timeline)
    for budget_bytes in (None, 3 * GIB):
        picture.draw_timeline(rehearsal, tmp_path / "step.png", "tiny on T4", budget_bytes)
        assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "step.png").unlink()


@pytest.mark.usefixtures("plans")
def test_many_gpus_are_planned_with_what_they_send(leanft, monkeypatch):
    def given(recipe, cfg, device, room, progress, own, machines):
        return search.Search([search.Candidate({}, own)], [], [], {})

    monkeypatch.setattr(search, "search", given)  # has its own tests
    monkeypatch.setattr(search, "search_adapters", lambda *_: {})
    tiny = ("--config", "tiny/full", "data.max_length=64", "--device-name", "H100")
    answer = leanft.ok("plan", "finetune", *tiny, "gradient_accumulation_steps=4", "--gpus", "2", "--nodes", "2")
    assert "planned for 4 x H100 on 2 machines in " in answer.out
    assert re.search(r"peak [\d.]+ [MG]iB on each", answer.out)
    assert re.search(r"each GPU sends 0 B within its machine and [\d.]+ MiB to other machines per step", answer.out)


def test_a_server_is_planned_on_its_own_card_or_with_a_share_of_the_training_card(leanft, monkeypatch):
    def planned(recipe, cfg, device, machines, needs_timeline=False):
        room = int((machines.engine_share or 0.92) * device.memory_bytes)
        engine = EngineRound(
            *(64, min(64, room // GIB), 100, GIB, 2 * GIB, room, machines.engine_share > 0, 0.5, 0.02),
            *("merged", GIB, 0.5, 1, bool(cfg.generation.ahead)),
        )
        return Rehearsal(Peak("loss", {"weights": 2 * GIB}), 3.0, 600, 9, [], reserved_bytes=2 * GIB, engine=engine)

    monkeypatch.setattr("lean_ft.plan.known_plans.known_or_new", planned)
    monkeypatch.setattr(search, "search", lambda *args: search.Search([search.Candidate({}, args[5])], [], [], {}))
    monkeypatch.setattr(search, "search_adapters", lambda *_: {})
    sampled = ("plan", "grpo", "--config", "tiny/grpo", "--device-name", "T4")
    server = ("generation.engine=vllm", "loss.correction=token_truncate")

    def printed(*more: str) -> str:
        return re.sub(r"\s+", " ", leanft.ok(*sampled, *server, *more).out)

    apart = printed()
    assert "engine on a separate T4: 3.00 GiB of the 13.43 GiB that it may take" in apart
    assert "weights 0.5 s (merged, 1.00 GiB), sampling 10 s (20.0 ms for a token of 13 completions)" in apart
    assert "takes 14 s one after the other, and 11 s with generation.ahead=1 (1.27x as fast)" in apart
    assert "speed: 43 tokens/s, 14 s a step" in apart and "speed: 55 tokens/s, 11 s a step" in printed(
        "generation.ahead=1"
    )
    assert "budget 14.60 GiB (0.50 GiB kept for the driver): the given settings fit, with 12.10 GiB left" in apart

    hour = ("max_steps=3600", "--price", "1")
    assert "and cost $28.00" in printed(*hour) and "and cost $14.00" in printed(*hour, "--engine-share", "0.9")

    beside = printed("--engine-share", "0.5")
    assert "engine on the same T4: " in beside and "(no gain on one device)" in beside
    assert "(0.50 GiB kept for the driver, 7.30 GiB kept for the engine): the given settings fit, with 4.80" in beside
    full = printed("--engine-share", "0.9")
    assert "13.14 GiB kept for the engine): the given settings do not fit: 1.04 GiB too much" in full
    assert "the engine does not fit" not in full
    small = printed("--engine-share", "0.01")
    assert "the engine does not fit: its weights and one completion need 3.00 GiB, and it may take 0.15 GiB" in small
    assert "a round takes" not in small and "speed: 200 tokens/s, 3 s a step" in small
    cards = (
        leanft.ok(*sampled[:-1], "T4,H100", *server, "--engine-share", share).out.splitlines()[1:]
        for share in ("0.9", "0.05")
    )
    assert [[line.split()[1] for line in lines] for lines in cards] == [["no", "yes"], ["no", "yes"]]

    assert "samples without one" in leanft.refused(*sampled, "--engine-share", "0.4")
    assert "expected a share" in leanft.refused(*sampled, *server, "--engine-share", "1")


TINY = ("plan", "--config", "tiny/full", "data.max_length=64", "max_steps=3600000")


@pytest.mark.usefixtures("plans")
def test_cards_are_compared_with_time_and_cost(leanft):
    answer = leanft.ok(*TINY, "--device-name", "H100, 4090,t4", "--price", "2,1,0.5")
    names, *rows = [re.split(r"  +", line.strip()) for line in answer.out.splitlines()]
    assert names == ["card", "fits", "peak", "tokens/s", "step", "3,600,000 steps", "cost"]
    assert [row[0] for row in rows] == ["H100", "RTX 4090", "T4"] and {row[1] for row in rows} == {"yes"}
    for row, price in zip(rows, (2, 1, 0.5), strict=True):
        hours, cost = float(row[5].removesuffix(" h").replace(",", "")), float(row[6][1:].replace(",", ""))
        assert cost == pytest.approx(hours * price, rel=0.01)
        assert hours == pytest.approx(1000 * float(row[4].removesuffix(" s")), rel=0.01)
    answer = leanft(*TINY, "--device-name", "H100,4090,t4", "--price", "2", "--budget", "1MiB")
    again = [re.split(r"  +", line.strip()) for line in answer.out.splitlines()][1:]
    assert [row[:5] for row in again] == [[row[0], "no", *row[2:5]] for row in rows] and again[0][6] == rows[0][6]


@pytest.mark.usefixtures("plans")
def test_the_ledger_sums_up_to_the_step(leanft):
    answer = leanft.ok(*TINY, "--device-name", "H100", "--budget", "1GiB", "--ledger", "--price", "1")
    assert re.search(
        r"speed: [\d,]+ tokens/s, [\d.]+ s a step; 3,600,000 steps take .* and cost \$[\d,.]+\n", answer.out
    )
    lines = answer.out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("module"))
    last = next(i for i, line in enumerate(lines) if i > first and re.match(r" +all ", line))
    numbers = [
        re.findall(r"([\d,]+) +([\d.]+) +[\d.]+ [KMG]?i?B +([\d.]+) ms +([\d.]+)%$", line) for line in lines[first:]
    ]
    rows = [[float(value.replace(",", "")) for value in found[0]] for found in numbers if found]
    *listed, total = rows
    assert len(listed) == last - first - 1 and total[3] == 100
    assert sum(row[0] for row in listed) == pytest.approx(total[0], abs=2)
    assert sum(row[2] for row in listed) == pytest.approx(total[2], rel=0.1)
    assert [row[2] for row in listed[:25]] == sorted((row[2] for row in listed[:25]), reverse=True)
    assert re.search(r"its kernels take \d+% of that at the card's published rates", answer.out)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--device-name", "H100,4090,t4", "--price", "1,2"), "--price has 2 prices for 3 cards"),
        (("--device-name", "H100", "--price", "cheap"), "--price is 'cheap'; expected a number per hour"),
        (("--device-name", "H100", "--price", "-1"), "--price is '-1'; expected a number per hour"),
        (("--device-name", "H100,RTX 409"), "unknown device 'RTX 409'. Did you mean 'RTX 4090'"),
        (("--device-name", "H100,4090", "--ledger"), "--png and --ledger show one card"),
    ],
)
def test_wrong_prices_and_cards_are_refused(leanft, arguments, error):
    refusal = leanft.refused(*TINY, *arguments)
    assert error in refusal
