"""A script in a worker finds what it would find under plain Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


def test_main_is_a_real_module(run_script, tmp_path):
    source = """
        import pickle, sys

        class Sample:
            pass

        main = sys.modules["__main__"]
        print(__name__, __file__ == main.__file__, pickle.loads(pickle.dumps(Sample)) is Sample is main.Sample)
        print(sys.argv[1:], sys.path[0], repr(sys.stdin.read()))
    """
    ran = run_script(source, 1, "--lr", "0.1")
    assert ran.out == f"__main__ True True\n['--lr', '0.1'] {tmp_path} ''\n"


def test_a_module_beside_the_script_is_found(run_script, tmp_path):
    (tmp_path / "beside.py").write_text("value = 42\n")
    assert run_script("import beside\nprint(beside.value)", 1).out == "42\n"


def test_processes_that_import_main_again_work(run_script):
    source = """
        import multiprocessing

        def square(x):
            return x * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [2, 3]))
            pool.join()
    """
    assert run_script(source, 1).out == "[4, 9]\n"


def test_threads_and_exit_functions_are_waited_for(run_script):
    source = """
        import atexit, threading
        atexit.register(print, "at exit")
        started = threading.Event()
        thread = threading.Thread(target=lambda: (started.wait(), print("thread")))
        thread.start()
        started.set()
    """
    assert run_script(source, 1).out == "thread\nat exit\n"


def test_workers_draw_different_numbers_until_they_are_seeded(run_script):
    source = """
        import random, sys
        import numpy
        sys.stdout.write(f"{random.random()} {numpy.random.rand()}\\n")
    """
    words = run_script(source, 2, output="all").out.replace("[0]", "").replace("[1]", "").split()
    assert len(set(words)) == 4


def test_a_forked_child_of_a_worker_is_not_the_worker(run_script):
    source = """
        import os, signal
        from unisono.cluster.connection import connect
        from unisono.cluster.environment import detect

        with connect(detect()) as connection:
            pid = os.fork()
            if pid == 0:
                os._exit(0 if detect().kind == "alone" else 1)
            assert os.waitpid(pid, 0)[1] == 0
            codes = set()
            for _ in range(50):
                child = os.fork()
                if child == 0:
                    signal.pause()
                os.kill(child, signal.SIGTERM)
                codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            print(codes)
            connection.store.set("still", "here")
    """
    ran = run_script(source, 1)
    assert (ran.outcome.exit_code, ran.out) == (0, "{-15}\n")


def test_sys_exit_with_words_shows_them(run_script):
    ran = run_script("import sys\nsys.exit('no data in /here')", 1)
    assert ran.outcome.exit_code == 1
    assert ran.last_words == "unisono: worker 0 failed: no data in /here"


def test_a_worker_that_gets_sigterm_ends_and_so_does_the_job(run_script):
    source = """
        import os, signal
        from unisono.cluster.connection import connect
        from unisono.cluster.environment import detect

        with connect(detect()) as connection:
            if connection.rank == 1:
                connection.store.get("waiting")
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                connection.store.set("waiting", "")
                connection.store.get("never")
            finally:
                print("cleaned up")
    """
    ran = run_script(source, 2)
    assert ran.last_words.splitlines()[-1] == "unisono: worker 1 failed: ended by SIGTERM"
    assert ran.outcome.exit_code == 143
    assert ran.out == "cleaned up\n"


def test_a_wait_inside_a_library_ends_on_sigterm(run_script):
    # Rank 1 never builds its group, so rank 0 waits in C++, where Python's signal handlers don't run.
    source = """
        import os, signal, threading, time
        from torch import distributed
        from unisono.cluster.connection import connect
        from unisono.cluster.environment import detect

        with connect(detect()) as connection:
            if connection.rank == 1:
                connection.store.get("waiting")
                os.kill(int(connection.store.get("pid")), signal.SIGTERM)
                connection.store.get("never")
            connection.store.set("pid", str(os.getpid()))
            connection.store.set("waiting", "")
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            distributed.ProcessGroupGloo(connection.store, 0, 2, options)
    """
    ran = run_script(source, 2, grace_s=20.0)
    assert ran.outcome.exit_code != 0
    assert ran.outcome.failure.rank == 0
    assert ran.seconds < 5


def test_two_jobs_at_once_do_not_meet(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, unisono\n"
        "with unisono.join() as run:\n"
        "    store = run._connection.store\n"
        "    total = store.add('sum', int(sys.argv[1]))\n"
        "    store.set(f'{run.rank}', 'here')\n"
        "    store.wait(['0', '1'])\n"
        "    print(run.world_size, store.get('sum').decode())\n"
    )
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", str(script)]
    jobs = [subprocess.Popen([*command, text], stdout=subprocess.PIPE, text=True) for text in ("1", "10")]
    assert [job.communicate(timeout=50)[0] for job in jobs] == ["2 2\n", "2 20\n"]
    assert [job.returncode for job in jobs] == [0, 0]


def test_many_launches_in_a_row_leave_nothing(launch):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        assert launch(os.getpid, 2)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fresh", [False, True])
def test_forked_and_fresh_workers_find_the_same(run_script, fresh):
    source = """
        import os, signal, sys
        from unisono.cluster.environment import detect
        environment = detect()
        print(sys.argv, sys.path[0], environment.rank, environment.world_size, os.getcwd())
        print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGCHLD))
    """
    ran = run_script(source, 1, "x", fresh=fresh)
    assert ran.outcome.exit_code == 0
    assert ran.out.splitlines()[0].endswith(f"0 1 {os.getcwd()}")
    assert ran.out.splitlines()[1] == f"{signal.SIG_IGN} {signal.SIG_IGN} {signal.SIG_DFL}"
