"""Which checkpoints stay."""

import pytest

from lean_ft.training.checkpoint import list_checkpoints
from lean_ft.training.retention import kept_steps, most_checkpoints
from tests.training.test_checkpoint import flip_a_byte
from tests.training.toy_runs import digests


def test_the_newest_the_multiples_and_the_best_stay(config, tmp_path):
    losses = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: float("nan"), 60: 2.0}

    def kept(**settings):
        return kept_steps(losses, config(tmp_path, **settings))

    assert kept() == set(losses)
    assert kept(keep_last=2) == {50, 60}
    assert kept(keep_last=1, keep_every=30) == {30, 60}
    assert kept(keep_last=1, keep_best=2) == {20, 40, 60}
    assert kept(keep_last=1, keep_best=9) == {10, 20, 40, 60}
    assert kept(save_every="auto") == {50, 60}
    assert kept(save_every="auto", keep_last=1, keep_every=30) == {30, 60}


@pytest.mark.parametrize("save_async", ["false", "true"])
def test_a_run_keeps_what_it_was_told_to(save_async, train, recipe, monkeypatch, tmp_path, capsys):
    log_evaluation = recipe.Run.log_evaluation
    monkeypatch.setattr(  # lowest after step 6
        recipe.Run, "log_evaluation", lambda self, **_: log_evaluation(self, abs(self._done_steps + 1 - 6.1))
    )
    settings = {"save_every": 2, "eval_every": 2, "keep_last": 1, "keep_every": 8, "keep_best": 1}
    run = train(tmp_path / "run", save_async=save_async, **settings)
    names = [p.name for p in list_checkpoints(run)]
    assert names == ["step_00000006", "step_00000008", "step_00000012"]
    assert not list(run.glob(".step_*"))
    assert "removed     step_00000010, as keep_last=1 asks" in capsys.readouterr().out
    assert digests(run / names[-1]) == digests(train(tmp_path / "all", eval_every=2) / names[-1])


def test_a_damaged_later_checkpoint_counts_for_nothing(train, tmp_path):
    """Else the newest whole one would make room for it."""
    run = train(tmp_path / "run", max_steps=8, save_every=2)
    for step in (6, 8):
        flip_a_byte(run / f"step_0000000{step}/model.safetensors")
    train(run, max_steps=5, keep_last=1)
    assert [p.name for p in list_checkpoints(run)] == ["step_00000005", "step_00000006", "step_00000008"]
    train(run, max_steps=8, save_every=2, keep_last=1)
    assert [p.name for p in list_checkpoints(run)] == ["step_00000008"]


def test_room_is_asked_for_what_is_kept_and_one_more(config, tmp_path):
    def most(**settings):
        return most_checkpoints(config(tmp_path, **settings), 0, 100, 30)

    assert most() == 1
    assert most(save_every=10) == 10
    assert most(save_every=10, keep_last=2) == 3
    assert most(save_every=10, keep_last=1, keep_every=50) == 4
    assert most(save_every=60, keep_last=5) == 2
    assert most(save_every="epoch") == 4  # 30, 60, 90 and the last
    assert most(save_every=0.5) == 7
    assert most(save_every="auto") == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_best": 1}, "keep_best keeps more than the newest checkpoints, and keep_last=null keeps all"),
        ({"keep_every": 5}, "keep_every keeps more"),
        ({"keep_last": 1, "keep_best": 1, "save_every": 4, "eval_every": 3}, "Set save_every to a multiple of eval"),
        ({"keep_last": 1, "keep_best": 1, "save_every": "auto", "eval_every": "epoch"}, "Set save_every to a multiple"),
        ({"keep_last": 1, "keep_best": 1, "save_every": "epoch", "eval_every": 2}, "Set save_every to a multiple"),
        ({"stop_after_evals": 2}, "with eval_every=0 there is only the last"),
        ({"schedule__warmup_steps": 2, "schedule__warmup_ratio": 0.1}, "both say how long the warm-up is"),
    ],
)
def test_settings_that_could_not_be_honoured_are_refused(settings, message, config, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)
