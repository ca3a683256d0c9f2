"""The number of threads that long calls take, beside a machine that is busy or quiet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import howsmooth as hs
from howsmooth import threads
from howsmooth.cli import main
from howsmooth.threads import fastest_threads, renew_threads, with_fastest_threads

pytestmark = pytest.mark.usefixtures("four_threads")


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The seconds of the typical computation by number of threads; time passes in every look at the clock."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    taken = {1: 4.0, 2: 2.0, 4: 1.0}
    monkeypatch.setattr("howsmooth.threads.time.monotonic", clock)
    monkeypatch.setattr("howsmooth.threads.seconds", lambda number: taken[number])
    return taken


@pytest.mark.parametrize(
    ("taken", "best"),
    [
        ({1: 4.0, 2: 2.0, 4: 1.0}, 4),
        ({1: 1.0, 2: 3.0, 4: 9.0}, 1),
        ({1: 4.0, 2: 2.0, 4: 3.0}, 2),
        ({1: 1.0, 2: 0.95, 4: 0.92}, 1),  # a gain that may be chance
    ],
)
def test_the_fastest_number_is_taken(machine: dict[int, float], taken: dict[int, float], best: int) -> None:
    machine.update(taken)
    assert threads.fastest(4) == best


def test_a_choice_is_renewed_and_the_users_number_comes_back(machine: dict[int, float]) -> None:
    with fastest_threads() as choice:
        assert choice.words == ""
        renew_threads()
        assert torch.get_num_threads() == 4
        assert choice.words == ""
        machine.update({1: 1.0, 2: 9.0, 4: 9.0})
        renew_threads()  # too early: the last choice stands a while
        assert torch.get_num_threads() == 4
        for _ in range(300):
            renew_threads()
        assert torch.get_num_threads() == 1
        assert choice.words == "computed with 1 to 4 of 4 threads, the fastest here"
    assert torch.get_num_threads() == 4


def test_a_command_says_the_number_that_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("howsmooth.threads.fastest", lambda most: 1)
    monkeypatch.setattr("howsmooth.threads._SHORT", 0.0)
    for command, words in (("profile", "--span 0:4"), ("measure", "--lengths 4 --samples 1 --bounds none")):
        words += f" --layers 0 --out {tmp_path / command}"
        typed = [command, "builtin-encoder", *words.split()]
        assert main(typed) == 0
        out, err = capsys.readouterr()
        assert err.count("(computed with 1 of 4 threads, the fastest here)\n") == 1
        assert "threads" not in out
    assert main([*typed[:-1], str(tmp_path / "other"), "--threads", "4", "--seed", "1"]) == 0
    assert "computed with" not in capsys.readouterr().err


def test_a_given_number_stays_for_calls_inside(machine: dict[int, float]) -> None:
    machine.update({1: 1.0, 2: 9.0, 4: 9.0})

    @with_fastest_threads
    def inner() -> int:
        for _ in range(300):
            renew_threads()
        return torch.get_num_threads()

    with fastest_threads(3):
        assert inner() == 3
    assert torch.get_num_threads() == 4
    assert inner() == 1
    assert torch.get_num_threads() == 4


def test_a_call_in_another_thread_leaves_its_number(machine: dict[int, float]) -> None:
    machine.update({1: 1.0, 2: 9.0, 4: 9.0})
    found: list[int] = []

    def other() -> None:
        torch.set_num_threads(4)
        for _ in range(300):
            renew_threads()
        found.append(torch.get_num_threads())

    with fastest_threads():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [4]


def test_short_calls_and_one_thread_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> float:
        raise AssertionError("nothing is to be timed")

    monkeypatch.setattr("howsmooth.threads.seconds", refuse)
    with fastest_threads():
        renew_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("howsmooth.threads._SHORT", 0.0)
    with fastest_threads():
        renew_threads()


def test_a_measurement_chooses_in_its_steps_also_when_it_fails(machine, monkeypatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("howsmooth.threads.fastest", lambda most: chosen.append(most) or 1)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    hs.local_lipschitz(torch.nn.Tanh(), x[None])
    assert set(chosen) == {4}
    assert torch.get_num_threads() == 4
    with pytest.raises(hs.HowsmoothError):
        hs.local_lipschitz(lambda t: t * torch.nan, x[None])
    assert torch.get_num_threads() == 4
