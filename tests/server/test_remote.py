"""Remote modules: their forwards and backwards are those of a local module, to the bit, whoever else calls."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal import Engine
from shoal.errors import LaunchError, RemoteError, UserError
from shoal.server.remote import DistributedOptimizer, Owner, OwnerOptions, RemoteModule, remote
from shoal.server.remote.draws import _NAMES, forward_seed
from tests.server.common import TOKEN, together
from tests.server.test_sessions import until

pytestmark = pytest.mark.fast


class Mixed(nn.Module):
    """Takes and returns nested values of several dtypes; uses one input thrice, one parameter twice, one never."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.twice = nn.Parameter(torch.randn(width, width))
        self.never = nn.Parameter(torch.randn(3))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.low = nn.Linear(width, 2, dtype=torch.bfloat16)

    def forward(self, batch: dict[str, Any], *more: Any, scale: float = 1.0) -> dict[str, Any]:
        x = self.embedding(batch["ids"]) + batch["x"] * scale
        y = self.frozen(torch.tanh(x @ self.twice) @ self.twice) * batch["x"] + batch["x"]
        kept = y.masked_fill(batch["mask"], 0.0) if "mask" in batch else y
        return {"y": kept, "parts": (self.low(y.bfloat16()), [more, {"ids": batch["ids"] + 1}]), 3: None}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Any:
        return self.lstm(x, state)


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


class Outer(nn.Module):
    """A module with a remote one inside."""

    def __init__(self, address: str, factory: str = "norm", seed: int = 1) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.inner = remote(address, factory, token=TOKEN, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.before(x)))


class Ring(nn.Module):
    """Calls itself at the owners of a ring, `depth` times."""

    def __init__(self, addresses: list[str], at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._addresses, self._at = addresses, at
        self._next: RemoteModule | None = None

    def forward(self, x: Tensor, depth: int) -> Tensor:
        x = torch.tanh(self.linear(x))
        if depth == 0:
            return x
        if self._next is None:
            at = (self._at + 1) % len(self._addresses)
            ring = self._addresses, at
            self._next = remote(self._addresses[at], "Ring", *ring, token=TOKEN, name=f"ring {at}", seed=at)
        return self._next(x, depth - 1)


class Broken(nn.Module):
    def forward(self, x: Tensor, how: str) -> Tensor:
        if how == "in place":
            return x.add_(1.0)
        raise KeyError("a word that is not there")


class Held(nn.Module):
    """Multiplies by a tensor that it is given."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def drawing() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.3), nn.LSTM(40, 8, num_layers=2, dropout=0.5))


def attention() -> nn.Module:
    """Chooses its kernels by what looks at its operations."""
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)


FACTORIES = [drawing, attention, Held, Mixed, Recurrent, norm, Outer, Ring, Broken, nn.Linear, nn.Dropout]


@contextmanager
def owning(**more: Any) -> Iterator[Owner]:
    said: list[str] = []
    with Owner(FACTORIES, token=TOKEN, options=OwnerOptions(say=said.append, **more)) as owner:
        owner.said = said
        yield owner


def gradients(owner: Owner, context: str | None = None) -> dict[str, Tensor]:
    """The gradients that the owner keeps for its only module, in its only context unless another one is named."""
    (entry,) = owner._registry._entries.values()
    return entry.exposed.gradients.total(context or entry.exposed.gradients.contexts[0])


def local(factory: Callable[..., nn.Module], *args: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return factory(*args)


def same_gradients(owner: Owner, model: nn.Module, context: str | None = None) -> bool:
    kept = gradients(owner, context)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return kept.keys() == expected.keys() and all(torch.equal(kept[name], expected[name]) for name in kept)


def mixed_step(model: nn.Module, draw: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(3, 5, generator=draw).requires_grad_()
    batch = {
        "ids": torch.randint(11, (3,), generator=draw),
        "x": x * 1.0,
        "mask": torch.rand(3, 5, generator=draw) > 0.5,
    }
    found = model(batch, "a", (None, 2.5, x), scale=0.7)
    assert list(found) == ["y", "parts", 3] and found["parts"][1][0][:1] == ("a",)
    assert not found["parts"][1][1]["ids"].requires_grad
    assert found["parts"][0].dtype == torch.bfloat16
    total = found["y"].pow(2).sum() + found["parts"][0].float().sum() + found["parts"][1][0][1][2].sum()
    return total, [x]


def recurrent_step(model: nn.Module, draw: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(5, 2, 4, generator=draw).requires_grad_()
    out, state = model(x)
    out, (h, c) = model(torch.randn(2, 2, 4, generator=draw), state)
    return out.sum() + (h * c).sum(), [x]


def norm_step(model: nn.Module, draw: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    return model(torch.randn(8, 4, generator=draw)).pow(2).sum(), []  # no input needs a gradient


def attention_step(model: nn.Module, draw: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(2, 5, 16, generator=draw).requires_grad_()
    return model(x).pow(3).sum(), [x]


@pytest.mark.parametrize("shared", [True, False, "stepped"])
@pytest.mark.parametrize(
    ("factory", "step"),
    [(Mixed, mixed_step), (Recurrent, recurrent_step), (norm, norm_step), (attention, attention_step)],
    ids=lambda each: each.__name__,
)
def test_losses_and_gradients_are_those_of_a_local_module_to_the_bit(factory, step, shared):
    with owning() as owner:
        given = {"shared": shared} if shared != "stepped" else {"name": "of all"}
        far, near = remote(owner.address, factory, token=TOKEN, seed=0, **given), local(factory)
        if shared == "stepped":  # then stand-ins of parameters are used
            DistributedOptimizer("sgd", far)
        for number in range(3):  # gradients add up
            losses, inputs = [], []
            for model in (far, near):
                loss, given = step(model, torch.Generator().manual_seed(number))
                loss.backward()
                losses.append(loss.detach())
                inputs.append([each.grad for each in given])
            assert torch.equal(*losses)
            assert all(torch.equal(a, b) for a, b in zip(*inputs, strict=True))
        assert same_gradients(owner, near)


def test_the_gradient_of_one_element_comes_back_whatever_its_stride_is():
    with owning() as owner:
        far, near = remote(owner.address, nn.Linear, 2, 1, token=TOKEN, seed=0), local(nn.Linear, 2, 1)
        x = torch.randn(1, 2, requires_grad=True)
        found = [torch.autograd.grad(model(x).sum(), x)[0] for model in (far, near)]
        assert torch.equal(*found)


def test_a_state_is_that_of_the_owner():
    with owning() as inner, owning() as outer:
        far = nn.ModuleList([nn.Linear(2, 2), remote(outer.address, Outer, inner.address, token=TOKEN, seed=0)])
        near = nn.ModuleList([nn.Linear(2, 2), nn.Module()])
        near[1].before, near[1].inner = nn.Linear(4, 4), local(norm, seed=9)
        near[1].inner(torch.randn(8, 4))  # counts and means of its BatchNorm
        state = near.state_dict()
        assert far.state_dict().keys() == state.keys() and far.load_state_dict(state) == ([], [])
        assert all(torch.equal(each, state[name]) for name, each in far.state_dict().items())
        del state["1.inner.0.weight"]
        state["1.inner.more"] = torch.ones(1)
        assert far.load_state_dict(state, strict=False) == (["1.inner.0.weight"], ["1.inner.more"])
        with pytest.raises(RuntimeError, match=r"(?s)Outer of the owner at .*size mismatch for before\.weight"):
            far.load_state_dict(near.state_dict() | {"1.before.weight": torch.ones(3)})


def test_contexts_are_apart_and_end():
    with owning() as owner:
        far, near = remote(owner.address, norm, token=TOKEN, seed=0), local(norm)
        x = torch.randn(8, 4)
        with shoal.context() as one:
            first = far(x)
            with shoal.context() as two:
                second = far(2 * x)
                second.sum().backward()
            near(x)
            near(2 * x).sum().backward()
            assert one.name != two.name
            first.pow(2).sum().backward()  # in the context of its forward
            assert gradients(owner, two.name) == {} or same_gradients(owner, near, two.name)
            near.zero_grad()
            again = local(norm)
            again(x).pow(2).sum().backward()
            assert same_gradients(owner, again, one.name)
        until(lambda: owner.holdings().contexts == 0)


def test_many_threads_with_contexts_of_their_own_share_a_module():
    """Each has the gradients that it would have alone."""

    def train(owner: Owner, number: int) -> bool:
        far, near = remote(owner.address, Mixed, token=TOKEN, name="all", seed=0), models[number]
        with shoal.context() as mine:
            for step in range(4):
                for model in (far, near):
                    mixed_step(model, torch.Generator().manual_seed(10 * number + step))[0].backward()
            return same_gradients(owner, near, mine.name)

    models = [local(Mixed) for _ in range(4)]
    with owning() as owner:
        assert together(*(partial(train, owner, number) for number in range(4))) == [True] * 4
        assert owner.holdings().modules == 1


def test_forwards_of_one_client_in_flight_at_once():
    with owning() as owner:
        far, near = remote(owner.address, Recurrent, token=TOKEN, seed=0), local(Recurrent)
        xs = [torch.randn(3, 2, 4) for _ in range(4)]
        outs = together(*(partial(far, x) for x in xs))
        for x, (out, _) in zip(xs, outs, strict=True):
            near_out, _ = near(x)
            assert torch.equal(out, near_out)
        for out, _ in reversed(outs):
            out.sum().backward()
        for x in reversed(xs):
            near(x)[0].sum().backward()
        assert same_gradients(owner, near)


def test_a_remote_module_inside_a_remote_module():
    with owning() as inner, owning() as outer:
        far = remote(outer.address, Outer, inner.address, token=TOKEN, seed=0)
        torch.manual_seed(0)
        before = nn.Linear(4, 4)
        after = local(norm, seed=1)
        x = torch.randn(8, 4, requires_grad=True)
        with shoal.context() as mine:
            far(x).pow(2).sum().backward()
            found, x.grad = x.grad, None
            after(torch.tanh(before(x))).pow(2).sum().backward()
            assert torch.equal(found, x.grad)
            assert same_gradients(inner, after, mine.name)
            assert torch.equal(gradients(outer, mine.name)["before.weight"], before.weight.grad)
        until(lambda: inner.holdings().contexts == outer.holdings().contexts == 0)
        del far
        until(lambda: outer.holdings().modules == inner.holdings().modules == 0)


def test_a_ring_of_owners_calls_itself_without_a_deadlock():
    with owning() as a, owning() as b, owning() as c:
        addresses = [each.address for each in (a, b, c)]
        far = remote(a.address, Ring, addresses, 0, token=TOKEN, name="ring 0", seed=0)
        near = [local(nn.Linear, 4, 4, seed=seed) for seed in range(3)]
        x = torch.randn(2, 4, requires_grad=True)
        with shoal.context() as mine:
            outs = together(*(lambda: contexts_run(mine, lambda: far(x, 7)) for _ in range(3)))
            for out in outs:
                out.sum().backward()
            expected, x.grad = x.grad, None
            for _ in outs:
                y = x
                for depth in range(8):
                    y = torch.tanh(near[depth % 3](y))
                y.sum().backward()
            assert torch.equal(expected, x.grad)
            for owner, linear in zip((a, b, c), near, strict=True):
                assert torch.equal(gradients(owner, mine.name)["linear.weight"], linear.weight.grad)


def contexts_run(context: Any, call: Callable[[], Any]) -> Any:
    from shoal.server.remote.contexts import entered

    with entered(context):
        return call()


def test_a_graph_is_kept_when_it_is_asked_for_and_only_then():
    with owning() as owner:
        far, near = remote(owner.address, norm, token=TOKEN, seed=0), local(norm)
        x = torch.randn(8, 4)
        for model in (far, near):
            out = model(x).pow(2).sum()
            out.backward(retain_graph=True)
            out.backward()
            with pytest.raises(RuntimeError, match=r"backward .*second time"):
                out.backward()
        assert same_gradients(owner, near) and owner.holdings().graphs == 0


def test_gradients_of_inputs_alone_leave_those_of_parameters():
    with owning() as owner:
        far, near = remote(owner.address, norm, token=TOKEN, seed=0), local(norm)
        x = torch.randn(8, 4, requires_grad=True)
        (one,), (two,) = (torch.autograd.grad(model(x).sum(), [x]) for model in (far, near))
        assert torch.equal(one, two) and gradients(owner) == {}
        far(x).sum().backward(inputs=[x])
        assert gradients(owner) == {}


def test_what_waits_for_a_backward_goes_with_its_output_and_is_bounded():
    with owning(graphs=3) as owner:
        far = remote(owner.address, norm, token=TOKEN, seed=0)
        x = torch.randn(8, 4)
        with torch.no_grad():
            assert not far(x).requires_grad and owner.holdings().graphs == 0
        for _ in range(5):
            far(x)
            until(lambda: owner.holdings().graphs == 0)
        outs = [far(x) for _ in range(3)]
        with pytest.raises(UserError, match=r"3 forwards of this client wait.*OwnerOptions\(graphs=\.\.\.\)"):
            far(x)
        del outs
        gc.collect()
        until(lambda: owner.holdings().graphs == 0)
        kept = far(x)
        far.close()
        until(lambda: owner.holdings() == (0, 0, 0, 0))
        with pytest.raises(LaunchError, match="has been closed"):
            kept.sum().backward()


def test_modes_and_buffers_are_the_modules_own():
    with owning() as owner:
        far, near = remote(owner.address, norm, token=TOKEN, seed=0), local(norm)
        x = torch.randn(8, 4)
        for training in (True, False, True):
            assert torch.equal(far.train(training)(x), near.train(training)(x))
        (entry,) = owner._registry._entries.values()
        assert torch.equal(entry.exposed.module[1].running_mean, near[1].running_mean)


def test_a_seed_gives_the_same_draws_and_leaves_the_generator():
    with owning() as owner:
        state = torch.get_rng_state()
        one, other = (remote(owner.address, drawing, token=TOKEN, seed=seed) for seed in (3, 4))
        near = local(drawing, seed=3)
        x = torch.ones(5, 2, 40, requires_grad=True)
        torch.set_rng_state(state)
        for forward in range(2):
            found, others = one(x)[0], other(x)[0]
            assert torch.equal(state, torch.get_rng_state())
            with torch.random.fork_rng([]):
                torch.manual_seed(forward_seed(3, forward))
                assert torch.equal(found, near(x)[0]) and not torch.equal(found, others)
        unkeyed = remote(owner.address, nn.Dropout, 0.5, token=TOKEN)
        torch.manual_seed(0)
        found = unkeyed(x)
        torch.manual_seed(0)
        assert torch.equal(found, F.dropout(x, 0.5))


def test_a_seed_is_that_of_every_function_that_draws():
    """Distributions draw by functions that no layer uses."""
    inner = {"scaled_dot_product_attention", "miopen_rnn", "_lstm_mps", "_nested_tensor_softmax_with_shape"}
    inner |= {"_fused_sdp_choice", "_fused_dropout", "_fill_mem_eff_dropout_mask_"}  # and kernels of attention
    seeded = {
        each
        for each in dir(torch)
        for overload in getattr(getattr(torch.ops.aten, each, None), "overloads", list)()
        if torch.Tag.nondeterministic_seeded in getattr(getattr(torch.ops.aten, each), overload).tags
        and callable(getattr(torch, each))
        and not (each in inner or (each[0] == "_" and ("attention" in each or "cudnn" in each)))
    }
    assert {"_standard_gamma", "_sample_dirichlet"} < seeded <= _NAMES


def test_an_owner_without_factories_is_refused():
    with pytest.raises(UserError, match="there is nothing that clients may ask for"):
        Owner([], token=TOKEN)
    for one in (nn.Linear, "torch.nn:Linear"):
        with pytest.raises(UserError, match="is no list of what clients may ask for, and no dict: put it into one"):
            Owner(one, token=TOKEN)
    with pytest.raises(UserError, match=r"OwnerOptions\(graphs=0\): give a number from 1 on"):
        OwnerOptions(graphs=0)
    with pytest.raises(UserError, match='are both named "Linear": give a dict, with a name for each'):
        Owner([nn.Linear, type("Linear", (nn.Linear,), {})], token=TOKEN)


def test_errors_name_the_owner_and_leave_it_running(tmp_path):
    with owning() as owner:
        far = remote(owner.address, Broken, token=TOKEN)
        with pytest.raises(RemoteError, match=rf"Broken of the owner at {owner.address}: KeyError: 'a word"):
            far(torch.ones(1), "raise")
        with pytest.raises(UserError, match=r"Broken changes its input in place.*clone it"):
            far(torch.ones(1), "in place")
        with pytest.raises(UserError, match=r'Did you mean "norm"\? The owner exposes: drawing, attention, Held'):
            remote(owner.address, "nrom", token=TOKEN)
        with pytest.raises(RemoteError, match="TypeError"):
            remote(owner.address, nn.Linear, 3, token=TOKEN)
        with pytest.raises(UserError, match=r"a value of type .*Broken.* cannot be sent"):
            far(Broken())
        with pytest.raises(LaunchError, match="does not know this client's token"):
            remote(owner.address, norm, token="another token of the tests")
        with pytest.raises(UserError, match="is there already"):
            named = [remote(owner.address, nn.Linear, 3, out, token=TOKEN, name="one") for out in (4, 5)]
            assert named
        shared = remote(owner.address, nn.Linear, 3, 4, token=TOKEN, name="two", seed=1)
        with pytest.raises(UserError, match=r'"two" is there already, with seed = 1: leave the seed 2 out'):
            remote(owner.address, nn.Linear, 3, 4, token=TOKEN, name="two", seed=2)
        held = [partial(remote, owner.address, Held, torch.full((3,), value), token=TOKEN) for value in (1.0, 2.0)]
        x = torch.ones(1, 3)
        assert torch.equal(held[0](name="three")(x), held[0](name="three")(x))
        with pytest.raises(UserError, match=r'"three" is there already, of Held with other arguments'):
            held[1](name="three")
        assert torch.equal(remote(owner.address, nn.Linear, 3, 4, token=TOKEN, name="two")(x), shared(x))
        with pytest.raises(UserError, match=r"seed = '1' is no whole number"):
            remote(owner.address, nn.Linear, 3, 4, token=TOKEN, seed="1")
        with pytest.raises(UserError, match="name = 3 is no text"):
            remote(owner.address, norm, token=TOKEN, name=3)
        with pytest.raises(UserError, match=r"remote\(timeout=-1\): give seconds above 0"):
            remote(owner.address, norm, token=TOKEN, timeout=-1)
        with pytest.raises(UserError, match="cannot be pickled"):
            torch.save(far, tmp_path / "far.pt")
        assert torch.equal(
            remote(owner.address, norm, token=TOKEN, seed=0)(torch.ones(8, 4)), local(norm)(torch.ones(8, 4))
        )


def test_a_model_of_an_engine_has_a_remote_module_in_it():
    with owning() as owner:
        distant: list[RemoteModule] = []

        def model() -> nn.Module:
            distant[:] = [remote(owner.address, nn.Linear, 4, 4, token=TOKEN, seed=0)]
            return nn.Sequential(nn.Linear(4, 4), *distant)

        def loss(model, mb):
            return model(mb["x"]).square().mean(-1).sum(), len(mb["x"])

        sgd = partial(torch.optim.SGD, lr=0.1)
        engine = Engine(model, loss, sgd, global_batch=4, microbatch=2, seed=0)
        optimizer = DistributedOptimizer("sgd", distant, lr=0.1)
        dataset = [{"x": torch.full((4,), number / 8)} for number in range(8)]
        whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with engine.whole_weights():
            whole[0].load_state_dict(
                {name[2:]: each for name, each in engine.module.state_dict().items() if name[0] == "0"}
            )
        whole[1].load_state_dict(distant[0].state_dict())
        local = torch.optim.SGD(whole.parameters(), lr=0.1)
        for batch in engine.batches(dataset, steps=4):
            found = engine.step(batch)
            optimizer.step()
            optimizer.zero_grad()
            value = whole(torch.stack([dataset[index]["x"] for index in batch.ids])).square().mean()
            local.zero_grad()
            value.backward()
            local.step()
            assert found.loss == pytest.approx(value.item(), rel=1e-5)
        engine.close()
        with pytest.raises(UserError, match=r"1 is a remote module: .* the loss scale"):
            Engine(model, loss, sgd, global_batch=4, precision="fp16")
        with torch.device("meta"), pytest.raises(NotImplementedError, match="Linear of the owner"):
            remote(owner.address, nn.Linear, 4, 4, token=TOKEN)


def test_a_process_that_ends_with_modules_in_use_ends_well():
    with owning() as owner:
        script = (
            "import sys, torch, shoal\n"
            "from torch import nn\n"
            "far = [shoal.remote(sys.argv[1], nn.Linear, 4, 4, token=sys.argv[2]) for _ in range(40)]\n"
            "waiting = [each(torch.ones(2, 4)) for each in far]\n"
        )
        command = [sys.executable, "-c", script, owner.address, TOKEN]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        until(lambda: owner.holdings() == (0, 0, 0, 0))
        assert not owner.said  # each module has left its owner, none was cut off


def test_derivatives_that_do_not_go_through_are_refused_by_name():
    with owning() as owner:
        far = remote(owner.address, norm, token=TOKEN, seed=0)
        x = torch.randn(8, 4, requires_grad=True)
        with pytest.raises(UserError, match=r"norm of the owner.*higher order \(create_graph=True\)"):
            torch.autograd.grad(far(x).sum(), [x], create_graph=True)
        with pytest.raises(UserError, match=r"torch\.func and forward-mode"):
            torch.func.jvp(far, (x,), (x,))
        with pytest.raises(UserError, match=r"torch\.func and forward-mode"):
            torch.func.vmap(far)(x)
