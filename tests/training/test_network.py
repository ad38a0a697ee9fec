"""The training model: the same function as transformers', learnable, and decoded step by step as in one pass."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3NextForCausalLM

from training import decode, delta_rule, export
from training.network import Config, Network
from training.packing import Encoder, Packer, rows
from training.train import Average, Trainer, summary

BUILTIN = Path(__file__).parents[2] / "src" / "deltaserve" / "builtin"
CONFIG = Config.read(export.HERE / "config.json")
TOKENIZER = BUILTIN / "tokenizer.json"


def random_network(config: Config = CONFIG) -> Network:
    """Weights large enough that every part shows in the logits."""
    torch.manual_seed(0)
    net = Network(config)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.dim() > 1 and "conv" not in name:
                parameter.mul_(3)
            elif not name.endswith(("a_log", "dt_bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return net.eval()


def test_export_loads_in_transformers_with_equal_logits(tmp_path: Path) -> None:
    net = random_network()
    export.save_weights(net, tmp_path / "weights.safetensors", torch.float32)
    export.assemble(tmp_path / "weights.safetensors", BUILTIN, tmp_path / "model")
    loaded: Any = Qwen3NextForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    theirs, info = loaded
    assert not info["missing_keys"]
    assert all(key.startswith("mtp.") for key in info["unexpected_keys"])
    tokens = torch.randint(0, 2000, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = theirs.eval()(tokens).logits
    torch.testing.assert_close(net.logits(tokens), want, rtol=1e-3, atol=1e-3)
    assert torch.equal(export.read(tmp_path / "model").logits(tokens), net.logits(tokens))


def test_load_names_what_does_not_fit(tmp_path: Path) -> None:
    export.save_weights(random_network(), tmp_path / "weights.safetensors")
    smaller = Network(replace(CONFIG, num_hidden_layers=4))
    with pytest.raises(ValueError, match="does not fit"):
        export.load_weights(smaller, tmp_path / "weights.safetensors")


def test_checkpoint_is_within_its_size(tmp_path: Path) -> None:
    export.save_weights(random_network(), tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").stat().st_size <= 12_000_000


def test_chunked_rule_equals_the_recurrence() -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(1, 75, 2, 8), torch.randn(1, 75, 2, 8), torch.randn(1, 75, 4, 8)
    g, beta = -torch.rand(1, 75, 4), torch.rand(1, 75, 4)
    state, outs = torch.zeros(1, 4, 8, 8), []
    for t in range(75):
        out, state = delta_rule.step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outs.append(out)
    torch.testing.assert_close(delta_rule.chunked(q, k, v, g, beta), torch.stack(outs, 1), rtol=1e-4, atol=1e-5)


def test_lock_step_decoding_equals_one_pass() -> None:
    net = random_network(replace(CONFIG, num_hidden_layers=4))
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]
    made = decode.generate(net, prompts, [6, 4], stop=[2034], dtype=torch.float32)
    assert [len(m) for m in made] == [6, 4]
    for prompt, new in zip(prompts, made, strict=True):
        logits = net.logits(torch.tensor([prompt + new]))
        assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == new


def test_acceptance_counts_hits_of_the_draft_layer() -> None:
    net = random_network(replace(CONFIG, num_hidden_layers=4))
    prompt = [5, 6, 7]
    made = decode.generate(net, [prompt], [20], stop=[2034], dtype=torch.float32)
    greedy = decode.acceptance(net, [prompt + made[0]], [3], torch.float32)
    warm = decode.acceptance(net, [prompt + made[0]], [3], torch.float32, temperature=0.8)
    assert all(0 <= x <= 1 for x in greedy + warm)
    assert 0 < warm[0] < 1, "sampled drafts of an untrained layer are accepted now and then"


def test_rows_are_packed_and_repeatable() -> None:
    encoder, pad = Encoder(str(TOKENIZER)), 2032
    first, again = (rows(encoder, 11, 512, pad, batch=10) for _ in range(2))
    for _ in range(4):
        row = next(first)
        assert row == next(again)
        assert len(row[0]) == len(row[1]) == 512
        assert max(row[1]) == 100
    assert Packer(8, pad).add(list(range(9)), [1] * 9) is None, "too long for a row"


def test_twenty_steps_lower_the_loss() -> None:
    torch.manual_seed(3)
    net = Network(replace(CONFIG, num_hidden_layers=2, full_attention_interval=2))
    trainer = Trainer(net, torch.float32, rate=3e-3, drafts=1)
    source = rows(Encoder(str(TOKENIZER)), 7, 128, 2032, batch=20)
    drawn = [next(source) for _ in range(40)]
    losses = []
    for i in range(20):
        pair = drawn[2 * i : 2 * i + 2]
        tokens, weights = torch.tensor([r[0] for r in pair]), torch.tensor([r[1] for r in pair]).float() / 100
        losses.append(summary(trainer.step(tokens, weights, factor=min(1.0, (i + 1) / 5), progress=0.0)))
    assert losses[0]["loss"]["main"] > 7.0, "an untrained model knows nothing"
    assert losses[-1]["loss"]["main"] < losses[0]["loss"]["main"] - 1.5
    assert losses[-1]["loss"]["mtp1"] < losses[0]["loss"]["mtp1"] - 1.0


def test_average_follows_the_weights_and_goes_back() -> None:
    net = random_network()
    average, last = Average(net, steps=3), net.norm.detach().clone()
    want = torch.zeros_like(last)
    for step in range(1, 6):
        with torch.no_grad():
            net.norm.add_(step)
        average.add()
        want += (net.norm.detach() - want) / min(step, 3)
    kept = net.norm.detach().clone()
    average.swap()
    torch.testing.assert_close(net.norm.detach(), want)
    assert not torch.equal(want, kept)
    average.swap()
    assert torch.equal(net.norm.detach(), kept)
