"""A run without `output_dir` resumes its own unfinished run, or takes the next free name."""

import shutil
from pathlib import Path

import pytest

from lean_ft.settings.run import DEFAULT_OUTPUT_DIR
from lean_ft.training.records import DirectoryLock, locks
from lean_ft.training.starting import choose_output_dir, settled


@pytest.fixture
def first(config, tmp_path, monkeypatch) -> Path:
    """The first name that a run takes in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return config(DEFAULT_OUTPUT_DIR).output_dir


@pytest.fixture
def unfinished(first, interrupted) -> Path:
    return interrupted(first, 4, killed=False)


def choice(config, **settings):
    directory, reason = choose_output_dir(config(DEFAULT_OUTPUT_DIR, **settings))
    return str(directory), reason


def numbered(first: Path, number: int) -> str:
    return f"{first}_{number}"


def test_the_name_is_of_the_model_and_the_recipe(first, model_folder, config):
    assert first == Path("runs") / f"{model_folder.name}_toy_recipe"
    assert choice(config) == (str(first), "a new run")
    assert not first.exists()  # choosing without a lock writes nothing


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tiny", "tiny"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"),
        ("org/name@v1.0", "name"),
        ("org/name:folder/name-Q4_K_M.gguf", "name-Q4_K_M"),
        ("org/name@main:name-q8_0.gguf", "name-q8_0"),
        ("/models/My Model (2)/", "My-Model-2"),
        ("runs/tiny_finetune", "tiny_finetune"),
        ("runs/tiny_finetune/step_00000100", "tiny_finetune"),
        ("here/../there", "there"),
        ("/", "model"),
    ],
)
def test_names_of_models(path, name, config):
    assert config(DEFAULT_OUTPUT_DIR, model__path=path).output_dir == Path(f"runs/{name}_toy_recipe")


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_steps": 9},
        {"save_every": 2},
        {"compile": "true"},
        {"memory__activation_checkpointing": "full"},
        {"batch_size": 4, "gradient_accumulation_steps": 1},
    ],
)
def test_an_unfinished_run_resumes_with_settings_that_keep_what_it_learns(settings, unfinished, config):
    assert choice(config, **settings) == (str(unfinished), "resumes its unfinished run")


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": 1}, "holds a run with other settings (seed: 0 then, 1 now)"),
        ({"optimizer__lr": 0.5}, "holds a run with other settings (optimizer.lr: 0.01 then, 0.5 now)"),
        ({"schedule__name": "cosine", "seed": 1}, "(seed: 0 then, 1 now and 1 more)"),
        ({"batch_size": 4}, "(batch_size: 2 then, 4 now)"),
        ({"resume": "never"}, "holds a run, and resume=never starts a new one"),
    ],
)
def test_other_settings_take_the_next_name(settings, said, unfinished, config):
    directory, reason = choice(config, **settings)
    assert directory == numbered(unfinished, 2)
    assert reason.startswith(f"a new run; {unfinished} ")
    assert said in reason


def test_a_run_that_saved_nothing_is_compared_too(first, interrupted, config):
    interrupted(first, 2)
    assert choice(config) == (str(first), "resumes its unfinished run")
    assert choice(config, optimizer__lr=0.5)[0] == numbered(first, 2)


def test_a_finished_run_is_never_extended(first, train, config, interrupted):
    train(first, max_steps=2)
    assert choice(config, max_steps=4) == (
        numbered(first, 2),
        f"a new run; {first} holds a finished run",
    )
    interrupted(Path(numbered(first, 2)), 4, killed=False)  # and the same command finds the second run
    assert choice(config)[1] == f"resumes its unfinished run; {first} holds a finished run"


@pytest.mark.long
def test_a_run_that_was_extended_is_finished_again(first, train, interrupted, config):
    train(first, max_steps=2)
    interrupted(first, 4, killed=False)  # with output_dir set
    assert choice(config)[0] == str(first)
    train(first, max_steps=6)
    assert choice(config, max_steps=12)[0] == numbered(first, 2)


def test_other_files_and_damaged_runs_are_left_alone(unfinished, config):
    for folder in unfinished.glob("step_*"):
        (folder / "training_state/training_state.json").write_text("{")
    second = Path(numbered(unfinished, 2))
    second.mkdir()
    (second / "thesis.tex").write_text("...")
    Path(numbered(unfinished, 3)).write_text("a file")
    assert choice(config) == (numbered(unfinished, 4), f"a new run; {unfinished}_3 holds other files")
    shutil.rmtree(second)
    assert choice(config) == (numbered(unfinished, 2), f"a new run; {unfinished} holds a run with damaged files")


def test_two_starts_at_once_take_two_directories(first, config, capsys):
    cfg = config(DEFAULT_OUTPUT_DIR)
    with settled(cfg) as one:
        other = locks.pop(first.absolute())  # as if another process held it
        with settled(cfg) as two:
            expected = first.absolute(), Path(numbered(first, 2)).absolute()
            assert (one.output_dir, two.output_dir) == expected  # user code may change the current folder
        other.release()
    assert f"_2: a new run; {first} is in use by another process\n" in capsys.readouterr().out
    assert not Path(numbered(first, 2)).exists()  # a run that never began leaves nothing


def test_a_run_in_a_given_directory_is_in_use_too(first, config):
    lock = DirectoryLock(first)
    with settled(config(DEFAULT_OUTPUT_DIR)) as cfg:
        assert cfg.output_dir == Path(numbered(first, 2)).absolute()
    lock.release()


def test_a_given_directory_is_not_changed(unfinished, config, capsys):
    with settled(config(unfinished)) as cfg:
        assert cfg.output_dir == unfinished.absolute()
    with pytest.raises(ValueError, match="seed: 0 then, 1 now"), settled(config(unfinished, seed=1)):
        pass
    assert capsys.readouterr().out == ""
