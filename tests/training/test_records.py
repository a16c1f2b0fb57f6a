import fcntl
import subprocess

from lean_ft.training.records import DirectoryLock, git_commit, remove_half_written


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    DirectoryLock(tmp_path / "run").release()
    assert "cannot be locked (No locks available)" in capsys.readouterr().out


def test_what_a_killed_process_left_is_deleted_and_nothing_else(tmp_path, capsys):
    (tmp_path / ".step_00000002.old-77").mkdir()
    for name in (".run.json.tmp-77", "run.json", ".lock", ".mine", "mine.tmp-7"):
        (tmp_path / name).write_text("x")
    remove_half_written(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", ".mine", "mine.tmp-7", "run.json"]
    said = capsys.readouterr().out
    assert ".run.json.tmp-77, an incomplete file" in said
    assert ".step_00000002.old-77, an incomplete checkpoint" in said


def test_git_commit_of_the_checkout(tmp_path):
    assert git_commit(tmp_path) is None

    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").stdout.strip()
    assert git_commit(tmp_path) == commit
    (tmp_path / "untracked").write_text("")
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == commit + "+changes"
