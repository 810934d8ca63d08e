"""`GradientPath`: what it holds of rows that a gradient flows through, and what it leaves to the view."""

from weakref import ref

import torch
from torch import Tensor

from hf_paged_cache.attention.gradients import GradientPath


def states(num_columns: int, *, requires_grad: bool) -> Tensor:
    return torch.randn(1, 2, num_columns, 4).requires_grad_(requires_grad)


def test_what_is_held_of_other_columns_than_those_before_a_forward_is_read_instead() -> None:
    """A forward that leaves out columns found in the pool starts after those that are held."""
    path, held, new = GradientPath(), states(3, requires_grad=True), states(2, requires_grad=True)
    path.join(0, {"key": held}, {"key": held}, 0)
    read = states(6, requires_grad=False)
    joined = path.join(0, {"key": new}, {"key": read}, 4)["key"]
    assert torch.equal(joined, torch.cat((read[:, :, :4], new), dim=2))


def test_where_less_is_held_than_a_window_shows_it_is_read_instead() -> None:
    """Rows were cut to before the forward that the gradient flows from."""
    path, new = GradientPath(), states(2, requires_grad=True)
    path.join(0, {"key": new}, {"key": states(5, requires_grad=False)}, 20)  # from column 17 on
    path.crop(18, 20)
    read = states(5, requires_grad=False)
    joined = path.join(0, {"key": new}, {"key": read}, 18)["key"]  # from column 15 on
    assert torch.equal(joined, torch.cat((read[:, :, :3], new), dim=2))


def test_what_no_gradient_flows_through_is_not_held() -> None:
    path, new = GradientPath(), states(3, requires_grad=False)
    joined = path.join(0, {"key": new}, {"key": new}, 0)
    watched = ref(joined["key"])
    del joined, new
    assert watched() is None


def test_rows_take_what_is_held_of_them_along() -> None:
    path = GradientPath()
    held = {name: torch.randn(3, 2, 3, 4).requires_grad_() for name in ("key", "value")}
    path.join(0, held, dict(held), 0)
    path.select([2, 0, 0])
    read = path.in_place_of(0, {name: torch.zeros(3, 2, 3, 4) for name in held}, [0, 1, 2], 3)
    assert all(read[name].equal(states[[2, 0, 0]]) for name, states in held.items())
    twice = path.in_place_of(0, {"key": torch.zeros(4, 2, 3, 4)}, [1, 0, 1, 2], 3)
    assert twice["key"].equal(held["key"][[0, 2, 0, 0]])
