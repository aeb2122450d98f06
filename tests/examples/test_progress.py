"""What is printed while an example trains."""

import pytest

import progress
from progress import Progress


def train(num_steps: int, *, show: bool = True) -> None:
    with Progress(num_steps, unit="tokens", show=show) as shown:
        for _ in range(num_steps):
            shown.advance(1.25, 100)


def test_a_log_gets_only_the_last_line_of_a_short_run(capsys):
    train(500)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("step 500/500  loss 1.250  ")
    assert lines[0].endswith(" tokens/s  0:00:00 left")


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch):
    now_s = iter(range(1000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now_s)))
    train(35)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 10/35", "step 20/35", "step 30/35", "step 35/35"]
    assert "100 tokens/s  0:00:25 left" in lines[0]


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    train(3)
    shown = capsys.readouterr().out
    assert "step 3/3" in shown
    assert "━" in shown


@pytest.mark.parametrize("forced", [False, True])
def test_workers_that_do_not_show_print_nothing(capsys, monkeypatch, forced):
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    train(3, show=False)
    assert capsys.readouterr().out == ""
