"""Runs on disk: one line each, found again by their job, and only from committed code."""

import json
import multiprocessing
import subprocess

import pytest

from experiments import runs
from experiments.runs import Job, Recorder, UncommittedChangesError, damaged_lines, read_runs
from models.shared.recipe import Recipe

JOB = Job("uci", "wine", "nn", 3, {"fold": 0, "recipe": {"epochs": 5}, "max_rows": None})


def git(directory, *arguments):
    command = ["git", "-C", str(directory), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*command, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one committed file, where the runs believe to be."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "code.py").write_text("a = 1\n")
    (root / ".gitignore").write_text("/results/draft/\n")
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "Start")
    monkeypatch.setattr(runs, "_ROOT", root)
    return root


def test_a_run_is_one_line_and_is_read_back(tmp_path):
    line = Recorder(tmp_path).record(JOB, {"metrics": {"rmse": 0.5}})
    assert (tmp_path / "runs.jsonl").read_text().count("\n") == 1
    assert read_runs(tmp_path) == [line]
    assert Job.of(line).key == JOB.key
    assert line["config"]["seed"] == 3


def test_what_changes_no_result_does_not_change_the_key():
    def key(**recipe):
        return Job("uci", "wine", "nn", 3, {"fold": 0, "recipe": recipe}).key

    assert key(epochs=5) == JOB.key
    assert key(epochs=5, device="cuda", progress=True) == JOB.key
    assert key(epochs=5, batch_size=Recipe().batch_size) == JOB.key  # older lines lack it
    assert key(epochs=6) != JOB.key
    assert Job("uci", "wine", "nn", 4, JOB.settings).key != JOB.key


def test_the_newest_line_of_a_job_counts(tmp_path):
    recorder = Recorder(tmp_path)
    for value in (1.0, 2.0):
        recorder.record(JOB, {"metrics": {"rmse": value}})
    (run,) = read_runs(tmp_path)
    assert run["metrics"]["rmse"] == 2.0


def test_a_line_cut_short_is_reported_and_the_next_one_is_whole(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.record(JOB, {})
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"experiment": "uci", "config": {"data')
    other = Job("uci", "gas", "nn")
    recorder.record(other, {})
    assert [run["config"]["dataset"] for run in read_runs(tmp_path)] == ["wine", "gas"]
    assert damaged_lines(tmp_path) == [2]


def _record_many(directory, number):
    recorder = Recorder(directory)
    for seed in range(20):
        recorder.record(Job("uci", "wine", f"model{number}", seed), {"text": "x" * 5000})


@pytest.mark.slow
def test_two_processes_can_record_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_record_many, args=(tmp_path, n)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(read_runs(tmp_path)) == 40
    assert damaged_lines(tmp_path) == []


def test_runs_are_recorded_from_a_clean_tree_with_its_commit(repository):
    line = Recorder(repository / "results" / "uci").record(JOB, {})
    assert len(line["commit"]) == 12
    assert "draft" not in line


def test_uncommitted_changes_are_refused_where_git_keeps_the_file(repository):
    (repository / "code.py").write_text("a = 2\n")
    with pytest.raises(UncommittedChangesError, match=r"code\.py\).*Commit them, or pass --draft"):
        Recorder(repository / "results" / "uci")
    assert not (repository / "results").exists()


@pytest.mark.parametrize("place", ["results/draft/uci", "../elsewhere"])
def test_drafts_are_marked_and_go_where_git_keeps_nothing(repository, place):
    (repository / "code.py").write_text("a = 2\n")
    line = Recorder(repository / place).record(JOB, {})
    assert line["draft"]
    assert line["commit"].endswith("+changes")


def test_untracked_files_and_other_kinds_of_files_are_no_changes(repository):
    (repository / "new.py").touch()
    (repository / ".gitignore").write_text("/results/draft/\n/site/\n")
    Recorder(repository / "results" / "uci")


def test_results_of_drafts_go_to_a_folder_that_git_ignores():
    assert str(runs.result_directory("uci", None, is_draft=True)) == "results/draft/uci"
    assert str(runs.result_directory("uci", None, is_draft=False)) == "results/uci"
    ignored = ["git", "check-ignore", "--quiet", "results/draft/uci/runs.jsonl"]
    assert subprocess.run(ignored, cwd=runs._ROOT).returncode == 0


def test_all_committed_lines_can_be_read():
    for path in sorted((runs._ROOT / "results").glob("*/runs.jsonl")):
        lines = [json.loads(row) for row in path.read_text().splitlines()]
        assert len(read_runs(path.parent)) == len(lines), path
        assert all(line["commit"] for line in lines)


def test_only_missing_runs_are_made_and_every_fit_has_one_line(tmp_path, capsys):
    made = []

    def run_fn(job, tell):
        tell("half way")
        made.append(job.seed)
        return {"metrics": {"rmse": float(job.seed)}}

    jobs = [Job("uci", "wine", "nn", seed) for seed in range(3)]
    runs.run_all(jobs[:1], run_fn, tmp_path, {"rmse": "RMSE"})
    capsys.readouterr()
    lines = runs.run_all(jobs, run_fn, tmp_path, {"rmse": "RMSE"})
    assert made == [0, 1, 2]
    assert len(lines) == 3
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "1 of 3 runs are recorded already; 2 to make."
    assert output[1:3] == [f"wine nn, seed {seed}, RMSE {seed}, 0 s" for seed in (1, 2)]
    assert "Means over runs" in output[3]
    runs.run_all(jobs, run_fn, tmp_path, {}, resume=False)
    assert made == [0, 1, 2, 0, 1, 2]
