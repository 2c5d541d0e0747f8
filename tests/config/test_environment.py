"""The environment variables of the package."""

from __future__ import annotations

import logging

import pytest

from transfer_queue.config import environment
from transfer_queue.errors import InvalidArgumentError

NUMBERS = [
    ("TQ_PRE_ALLOC_SAMPLE_NUM", environment.pre_alloc_sample_num, 1, "8", 8),
    ("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", environment.empty_batch_sleep_interval, 1.0, "0.25", 0.25),
    ("TQ_CONTROLLER_GET_METADATA_TIMEOUT", environment.get_metadata_timeout, 60.0, "5", 5.0),
]
FOLDERS = [("TQ_RUNTIME_DIR", environment.runtime_dir), ("TQ_ADDRESS", environment.address)]


class TestEnvironment:
    @pytest.mark.parametrize(("name", "read", "default", "text", "value"), NUMBERS)
    def test_numbers(self, name, read, default, text, value, monkeypatch):
        """Numbers are read at the time of the call; if unset or empty, the default applies."""
        monkeypatch.delenv(name, raising=False)
        assert read() == default
        monkeypatch.setenv(name, "")
        assert read() == default
        monkeypatch.setenv(name, f" {text} ")
        assert read() == value

    @pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
    @pytest.mark.parametrize(("name", "read"), [(row[0], row[1]) for row in NUMBERS])
    def test_nonsense(self, name, read, text, monkeypatch):
        """An invalid value is an error that contains the variable and the value."""
        monkeypatch.setenv(name, text)
        with pytest.raises(InvalidArgumentError, match=f"{name} is '{text}'; allowed: "):
            read()

    def test_half_a_sample(self, monkeypatch):
        """TQ_PRE_ALLOC_SAMPLE_NUM is a whole number."""
        monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "1.5")
        with pytest.raises(InvalidArgumentError, match="whole number"):
            environment.pre_alloc_sample_num()

    @pytest.mark.parametrize(("name", "read"), FOLDERS)
    def test_folders(self, name, read, monkeypatch, tmp_path):
        """Folders are absolute paths; None if unset."""
        monkeypatch.delenv(name, raising=False)
        assert read() is None
        monkeypatch.setenv(name, str(tmp_path))
        assert read() == str(tmp_path)
        monkeypatch.setenv(name, "relative")
        with pytest.raises(InvalidArgumentError, match=f"{name} is 'relative'; allowed: an absolute path"):
            read()

    def test_system_name(self, monkeypatch):
        """TQ_SYSTEM is a name; None if unset."""
        monkeypatch.delenv("TQ_SYSTEM", raising=False)
        assert environment.system_name() is None
        monkeypatch.setenv("TQ_SYSTEM", "train-1")
        assert environment.system_name() == "train-1"
        monkeypatch.setenv("TQ_SYSTEM", "../elsewhere")
        with pytest.raises(InvalidArgumentError, match="TQ_SYSTEM"):
            environment.system_name()

    @pytest.mark.parametrize(
        ("text", "level"), [("DEBUG", logging.DEBUG), ("info", logging.INFO), ("15", 15), ("", None)]
    )
    def test_logging_level(self, text, level, monkeypatch):
        """TQ_LOGGING_LEVEL is a level by name or number."""
        monkeypatch.setenv("TQ_LOGGING_LEVEL", text)
        assert environment.logging_level() == level

    @pytest.mark.parametrize("text", ["LOUD", "0", "-5"])
    def test_logging_nonsense(self, text, monkeypatch):
        """An invalid level is an error with the names of the levels."""
        monkeypatch.setenv("TQ_LOGGING_LEVEL", text)
        with pytest.raises(InvalidArgumentError, match=f"TQ_LOGGING_LEVEL is '{text}'; allowed: DEBUG"):
            environment.logging_level()
