"""What is known of a model from its configuration alone, and how quickly the program begins."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from transformers import AutoConfig

from howsmooth.cli import app
from howsmooth.cli.first_checks import check_at_once
from howsmooth.errors import ModelError
from howsmooth.model_folders import _REGULAR, stated_sizes
from howsmooth.models import load_model
from howsmooth.quick_imports import quick_imports
from howsmooth.study.plans import Plan


def test_of_a_plan_file_one_model_may_be_wrong() -> None:
    plan = Plan(models=["./nosuch", "builtin-encoder"], lengths=[8])
    check_at_once(plan, keep_going=True)
    with pytest.raises(ModelError, match="nosuch"):
        check_at_once(plan)


@pytest.mark.parametrize("kind", _REGULAR)
def test_a_configuration_states_what_the_loaded_model_has(kind: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 24}
    config = AutoConfig.for_model(kind, hidden_size=16, vocab_size=40, pad_token_id=0, **sizes)
    widths = ("intermediate_size", "hidden_dim", "ffn_dim", "word_embed_proj_dim", "embedding_size")
    for name, value in {**dict.fromkeys(widths, 16), "num_key_value_heads": 2, "head_dim": 8}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, random_init=True)
    assert stated_sizes(tmp_path) == {"layers": 3, "heads": 2, "positions": 24}
    assert (loaded.layers, loaded.heads, loaded.max_length) == (3, 2, 24)


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        '{"num_hidden_layers": 3}',
        '{"model_type": "t5", "num_hidden_layers": 3}',
        '{"model_type": "bert", "num_hidden_layers": 3, "add_cross_attention": true}',
        '{"model_type": "bert", "num_hidden_layers": "3"}',
        '{"model_type": "bert", "num_hidden_layers": 3, "n_layer": 4}',
    ],
)
def test_what_a_configuration_leaves_open_is_not_stated(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert stated_sizes(tmp_path) == {}


def test_imports_without_collections() -> None:
    code = """
import gc
from howsmooth.quick_imports import quick_imports
with quick_imports():
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 1000
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    frozen = gc.get_freeze_count()
    with quick_imports():  # PyTorch is imported here
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_options_are_few_enough_to_be_read() -> None:
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    options = [one for command in commands for one in command.params if one.param_type_name == "option"]
    slots = [name for one in options for name in one.opts if name.startswith("--")]
    assert len(slots) <= 132
    assert len(set(slots)) <= 90
