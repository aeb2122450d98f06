"""Questions about torch that the launcher does not import."""

from __future__ import annotations

import pytest

from unisono.cluster import probe
from unisono.errors import UsageError


def test_without_device_files_nothing_is_started_to_count_accelerators(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "python_command", None)
    assert probe.count_accelerators(tmp_path) == 0


def test_with_a_device_file_torch_decides(tmp_path):
    (tmp_path / "nvidia0").touch()
    import torch

    expected = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert probe.count_accelerators(tmp_path) == expected


def test_gloo_is_known_without_asking(monkeypatch):
    monkeypatch.setattr(probe, "python_command", None)
    probe.check_backend("gloo")


def test_the_answer_about_an_unknown_backend_names_a_known_one():
    with pytest.raises(UsageError, match="did you mean 'gloo'"):
        probe.check_backend("gluu")
