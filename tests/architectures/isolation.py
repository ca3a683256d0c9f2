"""One model type in a process of its own, so that a type that hangs or eats memory costs its own row only."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.architectures.build import class_name
from tests.architectures.measure import Row, measure

SECONDS = 60  # of the processor's time
PATIENCE = 10  # times as many by the clock, on a machine that is busy
GIGABYTES = 3  # beyond the memory that a fork inherits


def _inherited() -> int:
    """Return how many bytes of data this fork has from its parent, which after hours of tests has many."""
    statm = Path("/proc/self/statm")  # a file of Linux, whose sixth number counts pages of data
    return int(statm.read_text().split()[5]) * resource.getpagesize() if statm.exists() else 0


def _work(model_type: str, seconds: int, gigabytes: int, reply: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    limit = _inherited() + (gigabytes << 30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the warnings of six hundred models
    try:
        reply.send(measure(model_type))
    except BaseException as error:
        reply.send(
            Row(
                model_type, class_name(model_type), status="wrong", wrong=[f"{type(error).__name__}: {error}"]
            )
        )
    finally:
        reply.close()
        os._exit(0)


def isolated(model_type: str, seconds: int = SECONDS, gigabytes: int = GIGABYTES) -> Row:
    """Measure a type in a fork of this process, under limits of time and memory."""
    answer, reply = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_work, args=(model_type, seconds, gigabytes, reply)
    )
    child.start()
    reply.close()
    try:
        if answer.poll(PATIENCE * seconds):
            row: Row = answer.recv()
            return row
        reason = f"not done after {PATIENCE * seconds} seconds"
    except EOFError:
        reason = f"its process died (limits: {seconds} seconds, {gigabytes} GB)"
    finally:
        child.kill()
        child.join()
    return Row(model_type, class_name(model_type), status="not run", reasons={reason: 1})


def rows(model_types: Sequence[str]) -> Iterator[Row]:
    """Measure types one after the other."""
    measure("qwen3")  # so that every fork has what torch and transformers import at the first use
    for model_type in model_types:
        yield isolated(model_type)


def shard(model_types: Sequence[str], text: str) -> list[str]:
    """Every N-th type from the I-th on, of ``I/N``: each type in one of N shards, neighbours apart."""
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(f"{text} is not one of {parts} shards")
    return list(model_types[part - 1 :: parts])
