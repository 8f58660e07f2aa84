import pytest
import torch

from workbench.zoo import GPT, Block, GPTConfig, next_token_loss

SMALL = GPTConfig(vocab_size=11, num_blocks=3, width=16, num_heads=2, max_tokens=8)


def gpt(config=SMALL):
    torch.manual_seed(0)
    return GPT(config)


def ids_BT(num_sequences=2, num_tokens=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SMALL.vocab_size, (num_sequences, num_tokens), generator=generator)


@pytest.mark.parametrize("num_tokens", [1, 5, 8])
def test_it_scores_every_next_token(num_tokens):
    assert gpt()(ids_BT(3, num_tokens)).shape == (3, num_tokens, 11)


def test_no_token_sees_a_later_one():
    model, before = gpt(), ids_BT()
    after = before.clone()
    after[:, 5] = (after[:, 5] + 1) % SMALL.vocab_size
    one, other = model(before), model(after)
    assert torch.equal(one[:, :5], other[:, :5])
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_a_token_sees_every_earlier_one():
    model = gpt()
    embedded = []
    model.tokens.register_forward_hook(lambda _module, _args, output: embedded.append(output))
    logits = model(ids_BT(1))
    (grad_BTD,) = torch.autograd.grad(logits[0, -1].square().sum(), embedded)
    assert (grad_BTD.abs().sum(-1) > 0).all()


def test_blocks_are_modules_of_one_class_with_the_documented_size():
    model = gpt()
    assert all(type(block) is Block for block in model.blocks)
    assert len(model.blocks) == SMALL.num_blocks
    assert sum(p.numel() for p in model.blocks[0].parameters()) == 12 * 16**2 + 13 * 16
    assert model.get_parameter("blocks.2.mlp.0.weight").shape == (64, 16)


def test_the_number_of_parameters():
    d, v, t, b = SMALL.width, SMALL.vocab_size, SMALL.max_tokens, SMALL.num_blocks
    assert sum(p.numel() for p in gpt().parameters()) == 2 * v * d + t * d + b * (12 * d**2 + 13 * d) + 2 * d


def test_tied_weights_are_one_parameter():
    tied = gpt(GPTConfig(vocab_size=11, num_blocks=1, width=16, num_heads=2, max_tokens=8, tie_weights=True))
    assert tied.head.weight is tied.tokens.weight
    assert "head.weight" not in dict(tied.named_parameters())
    loss = next_token_loss(tied(ids_BT()), ids_BT())
    assert abs(loss.item() - torch.tensor(11.0).log().item()) < 1.0  # starts near a guess, not far above it


def test_the_same_seed_gives_the_same_model():
    assert all(torch.equal(a, b) for a, b in zip(gpt().parameters(), gpt().parameters(), strict=True))


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match=r"at most max_tokens = 8 tokens, not 9"):
        gpt()(ids_BT(1, 9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "3 heads do not divide 16"),
        ({"num_blocks": 0}, "num_blocks is at least 1"),
        ({"width": -16}, "width is at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, message):
    sizes = {"vocab_size": 11, "num_blocks": 1, "width": 16, "num_heads": 2} | change
    with pytest.raises(ValueError, match=message):
        GPTConfig(**sizes)


def test_the_loss_of_a_certain_guess_is_0_and_of_a_uniform_one_log_v():
    targets = torch.tensor([[1, 0]])
    sure = torch.nn.functional.one_hot(targets, 4).float() * 100
    assert next_token_loss(sure, targets).item() == pytest.approx(0)
    assert next_token_loss(torch.zeros(1, 2, 4), targets).item() == pytest.approx(torch.tensor(4.0).log().item())
