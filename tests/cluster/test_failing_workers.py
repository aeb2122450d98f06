"""One worker fails: the whole job is gone in seconds, and the cause is what the user sees last.

The jobs train a small model on real processes.
"""

from __future__ import annotations

import pytest

DEADLINE_S = 5.0
LIMIT_S = DEADLINE_S + 5.0

TRAIN = """
    import atexit, os, signal, subprocess, sys, time
    import torch, unisono

    variant = sys.argv[1]
    rank = int(os.environ["UNISONO_WORKER"].split(",")[1])

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            fail_if("dataset", rank == 2 and index >= 28)
            return torch.full((8,), index / 64.0), torch.tensor([1.0])

    def fail_if(name, condition):
        if variant == name and condition:
            raise ValueError("row 17")

    def loss_fn(model, micro_batch):
        x, y = micro_batch
        return torch.nn.functional.mse_loss(model(x), y)

    with unisono.join(step_timeout_s=5) as run:
        step = -1
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        if variant == "forward":
            model.register_forward_pre_hook(lambda *_: fail_if("forward", rank == 2 and step == 3))
        if variant == "hook":
            model[0].weight.register_hook(lambda grad: fail_if("hook", rank == 2 and step == 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if variant == "optimizer":
            optimizer.register_step_pre_hook(lambda *_: fail_if("optimizer", rank == 2 and step == 3))
        replica = run.replicate(model, optimizer)
        if variant == "atexit" and rank == 2:
            atexit.register(lambda: fail_if("atexit", True))
        for step, batch in enumerate(run.load(Rows(), batch_size=8, micro_batches=4)):
            if step == 3 and rank == 2:
                if variant == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if variant == "kill with children":
                    if os.fork() == 0:
                        time.sleep(1000)
                    subprocess.Popen(["sleep", "1000"])
                    os.kill(os.getpid(), signal.SIGKILL)
                if variant.startswith("vanish"):
                    os._exit(int(variant.split()[1]))
                if variant == "exit 3":
                    sys.exit(3)
                if variant == "leave":
                    sys.exit(0)
            replica.step(batch, loss_fn)
    print("done")
"""


@pytest.mark.parametrize("variant", ["dataset", "forward", "hook", "optimizer"])
def test_an_exception_on_one_worker_stops_the_job_and_is_shown_last(run_script, variant):
    ran = run_script(TRAIN, 4, variant)
    assert ran.outcome.exit_code == 1
    assert ran.seconds < LIMIT_S
    assert "rank 2" in ran.last_words
    assert ran.last_words.splitlines()[-1] == "unisono: worker 2 failed at step 3: ValueError: row 17"
    assert "ValueError: row 17" in ran.last_words.splitlines()[-4:-1]
    assert "in fail_if" in ran.last_words
    assert "WorkerLostError" not in ran.err + ran.last_words


def test_an_exception_at_exit_counts(run_script):
    ran = run_script(TRAIN, 4, "atexit")
    assert ran.outcome.exit_code == 1
    assert ran.last_words.splitlines()[-1] == "unisono: worker 2 failed at step 7: ValueError: row 17"


@pytest.mark.parametrize("variant", ["kill", "kill with children"])
def test_a_killed_worker_is_noticed_whatever_its_children_hold(run_script, variant):
    ran = run_script(TRAIN, 4, variant)
    last = ran.last_words.splitlines()[-1]
    assert last == "unisono: worker 2 failed at step 3: killed by signal 9 (SIGKILL)"
    assert ran.outcome.exit_code == 137
    assert ran.seconds < LIMIT_S
    assert (ran.outcome.killed == 2) == (variant == "kill with children")


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "ended with exit code 0 in the middle of the run"), (7, "exited with code 7, without a word")],
)
def test_a_worker_that_vanishes_is_a_failure_at_the_step_where_others_wait(run_script, code, words):
    ran = run_script(TRAIN, 4, f"vanish {code}")
    assert ran.outcome.exit_code == (code or 1)
    assert f"worker 2 failed at step 3: {words}" in ran.last_words
    assert ran.seconds < LIMIT_S


def test_the_exit_code_of_a_worker_is_the_jobs(run_script):
    ran = run_script(TRAIN, 4, "exit 3")
    assert ran.outcome.exit_code == 3
    assert ran.last_words.splitlines()[-1] == "unisono: worker 2 failed at step 3: exited with code 3"


def test_a_worker_that_leaves_while_it_is_needed_is_loud(run_script):
    ran = run_script(TRAIN, 4, "leave")
    assert ran.outcome.exit_code == 1
    assert "unisono: ended before that without an error: worker 2" in ran.last_words
    assert ran.seconds < LIMIT_S


def test_a_run_without_failure_says_nothing(run_script):
    ran = run_script(TRAIN, 4, "none")
    assert (ran.outcome.exit_code, ran.out, ran.err, ran.last_words) == (0, "done\n", "", "")


def test_an_exception_before_the_run_is_joined_is_shown(run_script):
    ran = run_script("import os\nraise ImportError('no such thing')", 2)
    assert ran.last_words.splitlines()[-1].endswith("failed: ImportError: no such thing")
    assert 'train.py", line 2' in ran.last_words
    assert "unisono/cluster" not in ran.last_words


def test_a_syntax_error_is_shown_as_python_shows_it(run_script):
    ran = run_script("x = (", 1)
    assert ran.outcome.exit_code == 1
    assert "SyntaxError: '(' was never closed" in ran.last_words


def test_a_worker_that_ignores_the_order_to_end_is_killed_within_the_grace_time(run_script):
    source = """
        import signal, time, unisono
        from unisono.cluster.connection import connect
        from unisono.cluster.environment import detect

        with connect(detect()) as connection:
            if connection.rank == 0:
                connection.store.get("ready")
                raise ValueError("row 17")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            connection.store.set("ready", "")
            time.sleep(1000)
    """
    ran = run_script(source, 2, grace_s=1.0)
    assert ran.outcome.ended[1] == -9
    assert ran.seconds < 5.0


def test_the_first_worker_may_finish_long_before_the_others(run_script):
    source = """
        import threading, unisono
        with unisono.join() as run:
            pass
        if run.rank == 2:
            threading.Event().wait(1.0)
    """
    ran = run_script(source, 3)
    assert (ran.outcome.exit_code, ran.err, ran.last_words) == (0, "", "")


def test_a_run_that_is_never_closed_is_no_failure(run_script):
    ran = run_script("import unisono\nrun = unisono.join()\nprint(run.rank)", 2)
    assert (ran.outcome.exit_code, ran.out, ran.err) == (0, "0\n", "")


def test_output_of_the_others_is_in_files(run_script, tmp_path):
    source = "import unisono\nrun = unisono.join()\nprint('hello from', run.rank)"
    run_script(source, 3)
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {"rank-1.log": "hello from 1\n", "rank-2.log": "hello from 2\n"}


def test_a_signal_does_not_interrupt_the_words_of_a_worker_that_failed(run_script):
    """As when the launcher stops a worker that is just telling how it failed."""
    ran = run_script(
        """
        import os, signal

        class Picky(Exception):
            def __str__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                return "in its own words"

        raise Picky
        """,
        1,
    )
    assert ran.outcome.exit_code == 1
    assert ran.last_words.splitlines()[-2] == "Picky: in its own words"
    assert ran.last_words.splitlines()[-1].endswith("Picky: in its own words")
