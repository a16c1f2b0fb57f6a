"""A profiled CPU step is divided without gaps, and its products are found with their layouts and measured."""

import time

import cpu_step as benchmark
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

LEFT, RIGHT = torch.ones(6, 4), torch.ones(3, 4)
# operation -> call; each multiplies (6, 4) by the transpose of (3, 4)
PRODUCTS = {
    "mm": lambda: LEFT @ RIGHT.T,
    "bmm": lambda: torch.bmm(LEFT[None], RIGHT.T[None]),
    "addmm": lambda: torch.addmm(torch.ones(3), LEFT, RIGHT.T),
    "addmm_": lambda: torch.zeros(6, 3).addmm_(LEFT, RIGHT.T),
}


@pytest.mark.parametrize(("operation", "call"), PRODUCTS.items(), ids=PRODUCTS)
def test_a_step_is_divided_into_parts_and_products(operation, call):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        started = time.perf_counter()
        call()
        with record_function("SumOfLosses"):
            call().exp()
        with record_function("optimizer update"):
            LEFT.clone().sqrt_()
        seconds = time.perf_counter() - started
    parts, products = benchmark.divide(profiler.events(), seconds)
    assert sum(map(sum, parts.values())) == pytest.approx(seconds)
    assert {"products: layers", "products: loss", "loss, without products", "optimizer update"} <= parts.keys()
    assert {(product.place, product.operation, len(calls)) for product, calls in products.items()} == {
        ("layers", operation, 1),
        ("loss", operation, 1),
    }
    for product in products:
        assert [sizes[-2:] for sizes in product.shapes] == [(6, 4), (4, 3)]
        assert [strides[-2:] for strides in product.strides] == [(4, 1), (1, 4)]
        assert str(product).endswith("6 x 4 x 3, right transposed")
        if operation != "bmm" or product.place == "layers":  # the loss has no batches of products
            found = benchmark.limits(product, whole=(4,))
            assert 0 < found["best_seconds"] <= found["alone_seconds"] < 1
