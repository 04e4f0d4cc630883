"""Learning rate of section 5.3."""

import equations
import pytest
import torch

from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.schedule import learning_rate, learning_rate_of, make_scheduler


@pytest.mark.parametrize("step", [1, 7, 3999, 4000, 4001, 100_000])
def test_the_rate_is_equation_3(step):
    assert learning_rate(step, 512, 4000) == pytest.approx(equations.learning_rate(step, 512, 4000))


def test_the_rate_of_the_base_model_is_highest_when_warmup_ends():
    rates = [learning_rate(step, 512, 4000) for step in range(1, 12_000)]
    assert max(rates) == rates[4000 - 1] == pytest.approx(6.99e-4, rel=1e-3)


def test_the_first_step_is_number_1():
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        learning_rate(0, 512, 4000)


def test_a_run_may_end_with_a_linear_cooldown():
    settings = {"warmup_steps": 5, "learning_rate_factor": 0.5, "max_steps": 20}
    rate = learning_rate_of(TrainConfig(**settings, cooldown_steps=3), 16)
    expected = [0.5 * equations.learning_rate(step, 16, 5) for step in range(1, 18)]
    expected += [expected[-1] * share for share in (0.75, 0.5, 0.25)]
    assert [rate(step) for step in range(1, 21)] == pytest.approx(expected)
    assert rate(21) == rate(30) == 0
    for wrong, rule in ((-1, "at least 0"), (20, "below max_steps, 20")):
        with pytest.raises(ValueError, match=f"cooldown_steps must be {rule}, got {wrong}"):
            TrainConfig(**settings, cooldown_steps=wrong)


def learning_rates_seen(steps, steps_done=0):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    rate = learning_rate_of(TrainConfig(warmup_steps=5, learning_rate_factor=0.5), 16)
    scheduler = make_scheduler(optimizer, rate, steps_done=steps_done)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_an_optimizer_takes_each_step_with_its_own_rate():
    expected = [0.5 * equations.learning_rate(step, 16, 5) for step in range(1, 13)]
    assert learning_rates_seen(12) == pytest.approx(expected)


def test_a_resumed_schedule_continues():
    assert learning_rates_seen(5, steps_done=7) == learning_rates_seen(12)[7:]
