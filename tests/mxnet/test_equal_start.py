"""With which values a network begins: frozen parameters, and statistics of a batch normalization."""

from __future__ import annotations

from typing import Any

import numpy as np

import tensorwire as tw
from tests.harness.jobs import for_each, run_job

Values = dict[str, Any]


def started(job: tw.Job, all_given: bool) -> tuple[Values, Values]:
    """Parameters before and after the first step of Trainer, whose learning rate is 0; drawn by each worker."""
    import tensorwire.mxnet  # noqa: F401  # isort: skip  # before mxnet
    import mxnet as mx

    mx.random.seed(job.rank)
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4, momentum=1.0), nn.Dense(1, in_units=4))
    net.initialize(mx.init.Normal(1.0))
    params = net.collect_params()
    net[0].weight.grad_req = "null"
    net[1].running_mean.set_data(mx.nd.full(4, job.rank + 1.0))

    def values() -> Values:
        return {name: param.data().asnumpy() for name, param in params.items()}

    before = values()
    given = {name: param for name, param in params.items() if all_given or param.grad_req != "null"}
    trainer = mx.gluon.Trainer(given, "sgd", {"learning_rate": 0.0}, kvstore="dist_tensorwire_sync")
    with mx.autograd.record():
        loss = net(mx.nd.ones((2, 3))).sum()
    loss.backward()
    trainer.step(4)
    mx.nd.waitall()
    return before, values()


def test_what_trainer_is_given_begins_as_worker_0s() -> None:
    cases = [(True,), (False,)]
    for (given,), (wanted, first), (other, second) in zip(cases, *run_job(for_each, started, cases).ok(), strict=True):
        frozen = {name for name in wanted if "dense0_weight" in name or "running_mean" in name}
        assert len(frozen) == 2
        for name in wanted:
            np.testing.assert_array_equal(first[name], wanted[name])
            np.testing.assert_array_equal(second[name], wanted[name] if given or name not in frozen else other[name])
        assert not any(np.array_equal(wanted[name], other[name]) for name in frozen)


def module(job: tw.Job) -> tuple[Values, Values, Values]:
    """A Module with a fixed layer, before and after it has its optimizer: arguments, and auxiliary states."""
    import tensorwire.mxnet  # noqa: F401  # isort: skip  # before mxnet
    import mxnet as mx

    mx.random.seed(job.rank)
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fixed")
    symbol = mx.sym.BatchNorm(symbol, name="norm")
    symbol = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(symbol, num_hidden=1, name="last"), name="out")
    made = mx.mod.Module(symbol, label_names=["out_label"], fixed_param_names=["fixed_weight"])
    made.bind([("data", (4, 3))], [("out_label", (4, 1))])
    made.init_params(mx.init.Normal(1.0))
    arguments, states = made.get_params()
    made.set_params(arguments, {**states, "norm_moving_mean": mx.nd.full(4, job.rank + 1.0)})
    before = {name: each.asnumpy() for name, each in made.get_params()[0].items()}
    made.init_optimizer(mx.kv.create("dist_tensorwire_sync"), optimizer_params={"learning_rate": 0.0})
    mx.nd.waitall()
    found = [each[0] for each in made._exec_group.param_arrays]
    after = dict(zip(made._exec_group.param_names, (each.asnumpy() for each in found), strict=True))
    return before, after, {name: each.asnumpy() for name, each in made.get_params()[1].items()}


def test_a_modules_arguments_begin_as_worker_0s_and_its_states_do_not() -> None:
    (wanted, first, _), (other, second, states) = run_job(module).ok()
    assert set(first) == set(wanted)
    assert not np.array_equal(wanted["fixed_weight"], other["fixed_weight"])
    for name in wanted:
        np.testing.assert_array_equal(first[name], wanted[name])
        np.testing.assert_array_equal(second[name], wanted[name])
    np.testing.assert_array_equal(states["norm_moving_mean"], np.full(4, 2.0))
