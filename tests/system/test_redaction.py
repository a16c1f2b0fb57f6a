"""A run writes no secrets and no home directory; paths that begin with `~` work."""

import json
import os
import re
import time

import pytest

from lean_ft.settings.text import load_config
from lean_ft.system.redaction import MAX_MESSAGE_CHARACTERS, printable, redact, redact_values
from tests.training import toy_recipe
from tests.training.toy_runs import QWEN

TOKEN = "hf_" + "aB3" * 11


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home" / "jane"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


def test_tokens_are_removed_and_homes_shortened(home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-make")
    assert redact(f"Bearer {TOKEN}.") == "Bearer [token]."
    assert redact("x=a-token-of-another-make") == "x=[token]"
    assert redact("https://jane:secret@hub.example/x") == "https://[token]@hub.example/x"
    assert redact(f"{home}/runs '{home}/a' {home}") == "~/runs '~/a' ~"
    assert redact(f"{home}2/runs /mnt{home}/x hf_model") == f"{home}2/runs /mnt{home}/x hf_model"


SECRETS = [
    TOKEN,
    "sk-proj-" + "a1_B" * 8,
    "ghp_" + "aB3" * 12,
    "github_pat_" + "aB3_" * 12,
    "AKIAIOSFODNN7EXAMPLE",
    "AIza" + "aB3-_" * 7,
    "wandb_v1_" + "aB3" * 12,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVP-mB92K27",
]
NOT_SECRETS = [
    "9cd71cf3f1f5d9b1d2d2a3b0f0b6a4c9f0b8e1d2",  # a commit, and the format of old wandb keys
    "task-specific desk-lamp-and-chair-for-two hf_model_of_mine",
    "https://huggingface.co/org/name@main http://localhost:8000/v1?user=me@home",
    "https://h/x?author=me&design=2&keyword=3&page=4 the token: a word; the password: none; C#key",
    '"http://a.example","me@home"',
]


IN_URLS = [
    "https://h/x?token=SECRET",
    "https://h/x?a=1&access_token=SECRET&b=2",
    "https://h/x?sv=2022&se=2030&sr=b&sp=r&sig=SECRET%3D",
    "https://h/x?AWSAccessKeyId=SECRET&Expires=1&Signature=SEC/RET%3D",
    "https://h/x?X-Amz-Credential=SECRET%2F2026&X-Amz-Signature=SECRET&X-Amz-Security-Token=SECRET",
    "https://h/x?X-Goog-Signature=SECRET&x-goog-credential=SECRET%40host",
    "https://h/x?Key-Pair-Id=K&Signature=SECRET~-_",
    "https://h/x?api_key=SECRET#part https://h/x?key=SECRET https://h/x?apikey=SECRET;code=SECRET",
    "https://h/x?client_secret=SECRET&password=SECRET&auth=SECRET&session_id=SECRET",
    "https://h/x#access_token=SECRET&token_type=SECRET",
    "https://h/x?next=https%3A%2F%2Fk%2F%3Ftoken%3DSECRET%26b%3D2",
    "Max retries exceeded with url: /x?sig=SECRET (Caused by E('/x?sig=SECRET', \\\"?token=SECRET\\\"))",
    "Authorization: Bearer SECRET-SECRET, {'authorization': 'Basic SECRETSECRET=='} {'x-api-key': "
    "'SECRETSECRETSECRET'}",
]


@pytest.mark.parametrize("text", IN_URLS)
def test_secrets_in_urls_and_headers_are_removed_and_the_rest_stays(text):
    redacted = redact(text)
    assert not re.search("SEC|RET", redacted)
    assert redact(redacted) == redacted
    assert redacted.startswith(text[:9])
    for part in ("a=1", "b=2", "se=2030", "sp=r", "Expires=1", "#part", "(Caused by", "%26b%3D2"):
        assert (part in redacted) == (part in text)


@pytest.mark.long
def test_redaction_takes_linear_time():
    for text in (
        "?key" * 300_000,
        "ey-" * 300_000,
        "?" + "token" * 200_000,
        "authorization:" * 70_000,
        "://a" * 300_000,
    ):
        started = time.process_time()
        redact(text)
        assert time.process_time() - started < 10  # a quadratic search takes minutes


def test_tokens_of_known_formats_are_removed_anywhere_and_ordinary_text_stays():
    long = " " * (MAX_MESSAGE_CHARACTERS * 3 // 4 - 60)
    for secret in SECRETS:
        assert secret[:12] not in printable(long + secret + long, MAX_MESSAGE_CHARACTERS)  # cut inside the secret
        for text in (f"{secret}", f"Bearer {secret}.", f'{{"a": "{secret}"}}', f"x={secret}\n"):
            assert redact(text) == text.replace(secret, "[token]")
    for text in NOT_SECRETS:
        assert redact(text) == text


def test_values_of_variables_named_like_secrets_are_removed(monkeypatch):
    named = {
        "OPENAI_API_KEY": "correct-horse",
        "MY_SECRET": "correct-horse-battery",
        "db_password": 'qu"ote\\n',
        "A_TOKEN": "short",
    }
    for name, value in {**named, "HF_TOKEN_PATH": "/etc/hostname", "USERNAME": "correcthorse"}.items():
        monkeypatch.setenv(name, value)
    text = 'correct-horse-battery correct-horse qu"ote\\n short /etc/hostname correcthorse'
    assert redact(text) == "[token] [token] [token] short /etc/hostname correcthorse"
    assert redact("https://token-alone@host/x https://u:p@ss@host") == "https://[token]@host/x https://[token]@host"


def test_a_secret_in_a_name_is_removed_and_no_value_is_lost(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cret-value")
    values = {"loss/s3cret-value": 1.0, "loss/[token]": 2.0, "lr": {"hf_" + "a" * 20: [3.0]}}
    found = redact_values(values)
    assert found == {"loss/[token]": 1.0, "loss/[token] (1)": 2.0, "lr": {"[token]": [3.0]}}


def test_a_message_is_bounded_and_has_no_control_characters():
    assert printable("a\x1b[2J\x07\x9b\ud800b\n\tc") == "a\\x1b[2J\\x07\\x9b\\ud800b\n\tc"
    text = printable("begin " + "x" * 10**6 + " end", MAX_MESSAGE_CHARACTERS)
    assert len(text) <= MAX_MESSAGE_CHARACTERS
    assert text.startswith("begin x")
    assert "characters left out" in text
    assert text.endswith("x end")


def test_a_run_under_the_home_writes_no_home_and_resumes(home, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("OPENAI_API_KEY", "correct-horse")
    (home / "model").mkdir()
    (home / "model/config.json").write_text(json.dumps(QWEN))

    def train(*arguments):
        given = [f"model.path={home}/model", "model.random_init=true", "device=cpu", *arguments]
        given += [f"log.project={TOKEN}", "log.name=https://jane:secret@host/correct-horse"]
        toy_recipe.main(load_config(toy_recipe.Config, None, given))

    train(f"output_dir={home}/run", "max_steps=1")
    run = home / "run"
    toy_recipe.main(load_config(toy_recipe.Config, run / "config.yaml", ["max_steps=2"]))
    train("output_dir=~/branch", "max_steps=3", "resume=~/run/step_00000002", "model.path=~/model")
    assert (run / "step_00000002").is_dir()
    assert (home / "branch/step_00000003").is_dir()
    written = [run / "config.yaml", run / "run.json", *run.rglob("training_state.json"), *run.rglob("*.jsonl")]
    for text in (capsys.readouterr().out, *(path.read_text() for path in written)):
        assert str(home) not in text
        assert not any(secret in text for secret in (TOKEN, "secret", "correct-horse"))
    assert "~/run" in (run / "config.yaml").read_text()
    assert os.environ["HF_TOKEN"] == TOKEN
