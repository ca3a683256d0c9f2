"""What makes tests on the device see a tensor left on the CPU; a pretended device does as a true one."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_tensors_on_two_devices_are_refused(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU is one device")
    here = torch.arange(6.0).view(2, 3)
    there = here.to(device)
    assert there.device.type == there.new_zeros(2).device.type == device.type
    places = torch.tensor([1, 0])
    for refused in (
        lambda: there + here,
        lambda: here.mul_(there),
        lambda: there @ here.mT,
        lambda: torch.cat([there, here]),
        lambda: torch.stack([here, there]),
        lambda: torch.where(there > 1, there, here),
        lambda: there.index_select(0, places),
        lambda: there.gather(0, places.view(1, 2)),
        lambda: here[places.to(device)],
        lambda: torch.mm(there, there.mT, out=torch.empty(2, 2)),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            refused()
    with pytest.raises(TypeError):
        there.numpy()


def test_what_may_come_from_the_cpu(device: torch.device) -> None:
    here = torch.arange(6.0).view(2, 3)
    there = here.to(device)
    places = torch.tensor([1, 0])
    assert (there * torch.tensor(2.0) + 1).cpu().tolist() == (2 * here + 1).tolist()
    assert there[places].tolist() == there[[1, 0]].tolist() == here[places].tolist()
    there[places] = torch.tensor(5.0)
    assert there.device.type == device.type
    assert there.cpu().tolist() == [[5.0] * 3] * 2
    here.copy_(there)
    assert here.tolist() == [[5.0] * 3] * 2
