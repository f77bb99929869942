"""ResNet, LSTM, MLP and the chess network."""

import pytest
import torch

from shoal.errors import UserError
from shoal.jobs.generated import generated, material
from shoal.models import LSTM, MLP, LSTMConfig, ResNet, ResNetConfig, causal_lm, chess_evaluator, encode_fen, regression

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.fast
@pytest.mark.parametrize(
    # 18, 34, 50: torchvision's counts. 20: 269,722 with parameterless shortcuts, and two projections with BatchNorm:
    # 576 + 2,176.
    ("depth", "classes", "count"),
    [(18, 1000, 11_689_512), (34, 1000, 21_797_672), (50, 1000, 25_557_032), (20, 10, 272_474)],
)
def test_resnet_has_the_published_size(depth, classes, count):
    with torch.device("meta"):
        model = ResNet(ResNetConfig(depth, classes))
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, classes)
    assert parameters(model) == count


def test_resnet_learns_and_keeps_running_statistics():
    model = ResNet(ResNetConfig(20, 10, channels=1))
    before = model.stem[1].running_mean.clone()
    model(torch.randn(4, 1, 16, 16) + 1).sum().backward()
    assert not torch.equal(model.stem[1].running_mean, before)
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(UserError, match="depth = 19 of ResNet is none of 18, 34, 50, 20"):
        ResNet(ResNetConfig(19, 10))


@pytest.mark.fast
def test_lstm_equals_a_stack_of_torch():
    model = LSTM(LSTMConfig(vocab_size=11, embedding=6, hidden=8, layers=2)).double()
    stack = torch.nn.LSTM(6, 8, num_layers=2, batch_first=True).double()
    weights = {
        f"{name[:-1]}{index}": tensor
        for index, block in enumerate(model.blocks)
        for name, tensor in block.state_dict().items()
    }
    stack.load_state_dict(weights)
    ids = torch.randint(0, 11, (3, 7))
    torch.testing.assert_close(model(ids), model.head(stack(model.token_embedding(ids))[0]))
    total, count = causal_lm(model, {"input_ids": ids, "labels": ids})
    assert count == 21
    total.backward()


@pytest.mark.fast
def test_lstm_options():
    tied = LSTM(LSTMConfig(11, 8, 8, tied=True, dropout=0.5))
    assert tied.head.weight is tied.token_embedding.weight
    ids = torch.randint(0, 11, (2, 5))
    assert not torch.equal(tied(ids), tied(ids))
    with pytest.raises(UserError, match="embedding = 6 equal to hidden = 8"):
        LSTMConfig(11, 6, 8, tied=True)


@pytest.mark.fast
def test_mlp_by_hand():
    model = MLP([2, 1, 1], "relu")
    with torch.no_grad():
        model.layers[0].weight.copy_(torch.tensor([[1.0, -1.0]]))
        model.layers[3].weight.fill_(2.0)
        model.layers[0].bias.zero_()
        model.layers[3].bias.fill_(0.5)
    assert model(torch.tensor([[3.0, 1.0], [1.0, 3.0]])).tolist() == [[4.5], [0.5]]
    for wrong, message in [
        (([4],), "at least the inputs"),
        (([4, 0],), "sizes = 0"),
        (([4, 2], "tan"), 'Did you mean "tanh"'),
    ]:
        with pytest.raises(UserError, match=message):
            MLP(*wrong)


@pytest.mark.fast
def test_fen_of_the_start_by_hand():
    position = encode_fen(START)
    assert position.shape == (773,)
    assert position.sum() == 32 + 1 + 4
    ones = set(position.nonzero().flatten().tolist())
    assert {64 * 0 + 8, 64 * 0 + 15} <= ones  # White's pawns on a2 and h2
    assert 64 * 5 + 4 in ones  # White's king on e1
    assert 64 * 10 + 59 in ones  # Black's queen on d8
    assert encode_fen("8/8/8/8/8/8/8/2K4k b q - 3 9").nonzero().flatten().tolist() == [64 * 5 + 2, 64 * 11 + 7, 772]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("fen", "reason"),
    [
        ("hello", "at least the board"),
        ("8/8/8/8/8/8/8 w - - 0 1", "7 ranks"),
        ("8/8/8/8/8/8/8/9 w - - 0 1", "'9' is no piece"),
        ("8/8/8/8/8/8/8/7 w - - 0 1", "7 squares"),
        ("8/8/8/8/8/8/8/8 x - - 0 1", "side to move"),
    ],
)
def test_what_is_not_a_position(fen, reason):
    with pytest.raises(UserError, match=reason):
        encode_fen(fen)


def test_the_chess_network_learns_material():
    data = generated("positions", 512)
    batch = {key: torch.stack([data[i][key] for i in range(512)]) for key in ("inputs", "targets")}
    assert torch.equal(batch["inputs"][7], generated("positions", 512)[7]["inputs"])
    assert batch["targets"].std() > 0.3
    model = chess_evaluator()
    assert parameters(model) == 773 * 515 + 515 + 515 * 515 + 515 + 515 + 1
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        total, count = regression(model, batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    assert losses[-1] < 0.3 * losses[0]


def test_material_by_hand():
    assert material(START) == 0
    assert material("4k3/8/8/3q4/8/8/PP6/R3K3 w - - 0 1") == 2 + 5 - 9
