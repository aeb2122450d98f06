"""Where output goes."""

from __future__ import annotations

import io
import os
import tempfile

import pytest

from unisono.cluster.output import LineCutter, OutputPlan, Outputs


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_lines_get_their_prefix_however_they_arrive(size):
    data = "één\ntwo\n\nrest".encode()
    cutter = LineCutter("[1] ")
    text = "".join(cutter.feed(data[start : start + size]) for start in range(0, len(data), size))
    text += cutter.feed(b"", final=True)
    assert text == "[1] één\n[1] two\n[1] \n[1] rest\n"


def test_without_a_prefix_text_is_passed_on_as_it_comes():
    cutter = LineCutter()
    assert cutter.feed(b"50 %\r") == "50 %\r"


def write(outputs, rank, text):
    with outputs.descriptors(rank) as (out, err):
        os.write(out, text)
        os.write(err, b"error\n")


def test_all_output_carries_its_rank():
    out, err = io.StringIO(), io.StringIO()
    outputs = Outputs(OutputPlan("all"), out=out, err=err)
    for rank in range(2):
        write(outputs, rank, b"hello\nlast")
    outputs.close()
    assert out.getvalue() == "[0] hello\n[0] last\n[1] hello\n[1] last\n"
    assert err.getvalue() == "[0] error\n[1] error\n"


def test_the_first_is_shown_and_the_others_are_kept(tmp_path):
    out, err = io.StringIO(), io.StringIO()
    outputs = Outputs(OutputPlan("first", keep=True, directory=tmp_path), out=out, err=err)
    write(outputs, 0, b"shown\n")
    write(outputs, 1, b"kept\n")
    with outputs.descriptors(2):
        pass
    outputs.close()
    assert out.getvalue() == "shown\n"
    assert outputs.logs == [tmp_path / "rank-1.log"]
    assert (tmp_path / "rank-1.log").read_text() == "kept\nerror\n"
    assert not (tmp_path / "rank-2.log").exists()


def test_a_folder_of_ours_in_which_nothing_is_kept_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outputs = Outputs(OutputPlan("first", keep=True), out=io.StringIO(), err=io.StringIO())
    with outputs.descriptors(1):
        assert len(list(tmp_path.iterdir())) == 1
    outputs.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failed", [True, False])
def test_a_folder_of_ours_is_kept_only_for_a_failed_job(tmp_path, monkeypatch, failed):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outputs = Outputs(OutputPlan("first", keep=True), out=io.StringIO(), err=io.StringIO())
    write(outputs, 1, b"kept\n")
    outputs.close(failed=failed)
    outputs.close()
    assert len(outputs.logs) == len(list(tmp_path.iterdir())) == int(failed)


def test_a_reader_that_went_away_is_no_failure():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    outputs = Outputs(OutputPlan("all"), out=Gone(), err=io.StringIO())
    write(outputs, 0, b"hello\n")
    outputs.close()
