"""Packed weights: the same products, only while active, and never stale."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mtp.huge_pages import PAGE, use_huge_pages
from mtp.packing import PackedLinears, is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="this build of torch cannot pack weights")


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 16, bias=False)).to(dtype)


def packed_output(packed: PackedLinears, net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), packed.active():
        return net(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (7,), (16,), (2, 33), (1, 3, 5)])
def test_packed_products_equal_plain_ones(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    net = model(dtype)
    packed = PackedLinears(net)
    assert len(packed) == 2
    x = torch.randn(*shape, 24).to(dtype)
    with torch.no_grad():
        expected = net(x)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(packed_output(packed, net, x), expected, rtol=tolerance, atol=tolerance)


def test_inputs_that_are_not_contiguous_are_read_right() -> None:
    net = model()
    x = torch.randn(24, 6).T
    with torch.no_grad():
        torch.testing.assert_close(packed_output(PackedLinears(net), net, x), net(x))


def replace_parameter(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(torch.randn_like(linear.weight))


def change_in_place(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight.mul_(-2.0)


def change_data_in_place(linear: nn.Linear) -> None:
    """What an adapter does when it is merged: `weight.data += delta`."""
    linear.weight.data += 1.0


def replace_data(linear: nn.Linear) -> None:
    linear.weight.data = torch.randn_like(linear.weight)


def load_state(linear: nn.Linear) -> None:
    linear.load_state_dict({name: torch.randn_like(value) for name, value in linear.state_dict().items()})


def change_bias(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.bias.add_(3.0)


@pytest.mark.parametrize(
    "change", [replace_parameter, change_in_place, change_data_in_place, replace_data, load_state, change_bias]
)
def test_weights_that_change_are_noticed(change: object) -> None:
    net = model()
    packed, x = PackedLinears(net), torch.randn(5, 24)
    before = packed_output(packed, net, x)
    change(net[0])
    with torch.no_grad():
        expected = net(x)
    assert not torch.allclose(before, expected)
    packed.refresh()  # as at the beginning of every generation
    packed.refresh()  # which may find nothing to do, and another begin
    torch.testing.assert_close(packed_output(packed, net, x), expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_packed_where_gradients_flow() -> None:
    net = model()
    packed, x = PackedLinears(net), torch.randn(3, 24)
    with packed.active():
        assert not any("forward" in module.__dict__ for module in net.modules())
        net(x).sum().backward()
    assert net[0].weight.grad is not None


def test_nothing_is_packed_under_autocast() -> None:
    net = model()
    packed = PackedLinears(net)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), packed.active():
        assert net(torch.randn(3, 24)).dtype == torch.bfloat16


def test_the_model_is_left_as_it_was_even_after_an_exception() -> None:
    net = model()
    packed = PackedLinears(net)
    with pytest.raises(RuntimeError), torch.no_grad(), packed.active():
        net(torch.randn(3, 24)) @ torch.zeros(3)
    assert not any("forward" in module.__dict__ for module in net.modules())


def test_a_forward_of_the_users_own_is_respected_and_put_back() -> None:
    """Accelerate's hooks and monkey patches live in the module's own `forward`."""
    net = model()
    packed, x = PackedLinears(net), torch.randn(3, 24)
    plain = net[0].forward
    net[0].forward = lambda x: plain(x) + 1.0
    with torch.no_grad():
        expected = net(x)
    torch.testing.assert_close(packed_output(packed, net, x), expected)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)


def test_hooks_still_run() -> None:
    net, seen = model(), []
    net[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    packed_output(PackedLinears(net), net, torch.randn(3, 24))
    assert seen == [(3, 40)]


def test_subclasses_and_other_precisions_are_left_alone() -> None:
    class Mine(nn.Linear):
        pass

    net = nn.Sequential(Mine(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).half())
    assert len(PackedLinears(net)) == 0


def test_weights_that_are_offloaded_or_of_a_class_of_their_own_are_left_alone() -> None:
    """Quantising with torchao changes the weight's class, not the layer's."""

    class Quantised(nn.Parameter):
        pass

    accelerate = pytest.importorskip("accelerate")
    assert len(PackedLinears(accelerate.cpu_offload(model(), execution_device="cpu"))) == 0
    net = model()
    net[0].weight = Quantised(net[0].weight.detach())
    assert len(PackedLinears(net)) == 1


def test_a_nested_use_ends_with_the_inner_block_only_for_the_inner_block() -> None:
    net = model()
    packed = PackedLinears(net)
    with torch.no_grad(), packed.active():
        with packed.active():
            pass
        assert "forward" in net[0].__dict__
    assert "forward" not in net[0].__dict__


def test_packed_copies_do_not_keep_the_model_alive() -> None:
    net = model()
    packed = PackedLinears(net)
    packed_output(packed, net, torch.randn(3, 24))
    reference = weakref.ref(net[0].weight)
    del net, packed
    gc.collect()
    assert reference() is None


def test_layers_that_moved_to_another_device_are_left_alone() -> None:
    net = model()
    packed = PackedLinears(net)
    net.to("meta")
    with torch.no_grad(), packed.active():
        assert not any("forward" in module.__dict__ for module in net.modules())


def test_large_pages_keep_what_is_on_them() -> None:
    weights = torch.arange(3 * PAGE // 4, dtype=torch.float32)
    use_huge_pages(weights.data_ptr(), weights.nbytes)
    assert torch.equal(weights, torch.arange(3 * PAGE // 4, dtype=torch.float32))


def test_memory_that_cannot_have_large_pages_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"7" * mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        read_only = np.frombuffer(mapped, np.uint8)
        use_huge_pages(read_only.ctypes.data, len(mapped))
        assert bytes(mapped) == b"7" * mmap.PAGESIZE
        del read_only
