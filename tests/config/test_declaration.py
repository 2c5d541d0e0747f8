"""What follows from the declarations of the settings: their defaults, `config.yaml`, the reference page."""

from __future__ import annotations

import doctest
import importlib.resources
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
from msgspec import Meta
from omegaconf import OmegaConf

from tools.generate_configuration import SECTIONS, tree_of_defaults
from transfer_queue.config import environment, settings, validators
from transfer_queue.config.declaration import Setting, declared_settings, setting
from transfer_queue.config.environment import VARIABLES
from transfer_queue.config.settings import KEYS, SETTINGS, Settings
from transfer_queue.config.store_options import STORE_OPTIONS
from transfer_queue.config.validators import Seconds

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "reference" / "configuration.md"


@dataclass(frozen=True)
class Example:
    size: Annotated[int, Meta(ge=1)] = setting("a.size", 3, "The size. It is small.")
    wait: Seconds | None = setting("a.b.wait", None, "How long to wait.")


def test_a_declaration_has_all_facts_of_a_setting():
    assert list(declared_settings(Example)) == ["size", "wait"]
    size = declared_settings(Example)["size"]
    assert (size.key, size.section, size.name, size.default) == ("a.size", "a", "size", 3)
    assert (size.summary, size.meaning) == ("The size.", "The size. It is small.")
    assert tree_of_defaults(list(declared_settings(Example).values())) == {"a": {"size": 3, "b": {"wait": None}}}


def test_the_generated_files_are_up_to_date():
    command = [sys.executable, str(ROOT / "tools" / "generate_configuration.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_resource_has_the_declared_defaults():
    text = (importlib.resources.files("transfer_queue") / "config.yaml").read_text("utf-8")
    assert OmegaConf.to_container(OmegaConf.create(text)) == tree_of_defaults(list(SETTINGS))


@pytest.mark.parametrize("each", SETTINGS, ids=lambda each: each.key)
def test_a_default_is_allowed_and_a_meaning_is_full_sentences(each: Setting):
    each.validator.convert(each.key, each.default)
    assert each.meaning[0].isupper()
    assert each.meaning.endswith(".")
    assert each.validator.allowed
    assert each.validator.type_name
    text = OmegaConf.create(f"key: {each.default_yaml}")
    assert OmegaConf.to_container(text) == {"key": each.default}


@pytest.mark.parametrize("module", [environment, settings, validators])
def test_the_examples_of_docstrings_run(module: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", raising=False)
    done = doctest.testmod(module)
    assert done.attempted > 0
    assert done.failed == 0


def test_every_field_of_the_settings_has_a_key():
    assert set(KEYS) == {each.name for each in fields(Settings)} == set(Settings.from_config().to_json())
    assert len({each.key for each in SETTINGS}) == len(SETTINGS)


def test_the_keys_of_the_options_of_a_store_are_their_names_in_its_section():
    for store, kind in STORE_OPTIONS.items():
        assert {name: each.key for name, each in declared_settings(kind).items()} == {
            each.name: f"backend.{store}.{each.name}" for each in fields(kind)
        }


def test_sections_with_a_description_have_settings():
    assert set(SECTIONS) <= {each.section for each in SETTINGS}


def test_the_page_has_every_setting_and_variable():
    headings = {line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("### ")}
    assert headings == {f"### `{each.key}`" for each in SETTINGS} | {f"### `{each.name}`" for each in VARIABLES}
