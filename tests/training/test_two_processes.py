"""Two processes give the results of one: the load of the experts is summed, and Muon updates whole matrices."""

import copy
from pathlib import Path

import pytest
import torch

from attnres.training.callbacks import balance_step, routers
from attnres.training.optimizer import build_optimizer

from .. import forks
from .running import BLOCKS, sizes_by_hooks


def two_processes(name: str, model, folder: Path) -> list[dict]:
    """Run a session of `two_processes_session.py`, and return the results of its processes."""
    start = {"config": model.config, "weights": model.state_dict(), "blocks": BLOCKS}
    torch.save(start, folder / "start.pt")
    session = Path(__file__).with_name("two_processes_session.py")
    done = forks.launch(session, name, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_the_load_and_the_tokens_are_summed_over_both_processes(tiny_model, tmp_path):
    model = tiny_model()
    results = two_processes("balance", model, tmp_path)
    with torch.no_grad():
        logits = model(BLOCKS, output_router_logits=True).router_logits
    for router, scores in zip(routers(model), logits):
        load = scores.topk(router.top_k).indices.flatten().bincount(minlength=router.num_experts)
        balance_step(router.e_score_correction_bias, load, 0.25)
    expected = torch.stack([router.e_score_correction_bias for router in routers(model)])
    assert expected.any()
    assert all(torch.equal(result["biases"], expected) for result in results)
    # A step of half a second on all of the blocks.
    assert [result["metrics"]["tokens_per_second"] for result in results] == [BLOCKS.numel() / 0.5] * 2
    assert results[0]["metrics"] == results[1]["metrics"]
    slices = torch.cat([result["slice"]["input_ids"] for result in results])
    assert not torch.equal(*slices)
    sizes = sizes_by_hooks(model, slices)
    assert results[0]["metrics"]["magnitude_output"] == pytest.approx(sizes[-1].item(), rel=1e-4)
    assert results[0]["metrics"]["magnitude_largest"] == pytest.approx(sizes[:-1].max().item(), rel=1e-4)
    assert 0 < results[0]["metrics"]["depth_entropy"] < 1


@pytest.mark.slow
def test_muon_under_fsdp2_makes_the_steps_of_one_process_also_after_a_resume(tiny_model, tmp_path):
    model = tiny_model()
    results = two_processes("fsdp2", model, tmp_path)
    assert [result["local_experts"] for result in results] == [4, 4]  # of 8, as the experts stay sharded

    start = copy.deepcopy(model.state_dict())
    settings = {"name": "muon", "learning_rate": 0.02, "residual_lr_factor": 0.5, "muon_per_head": True}
    optimizer = build_optimizer(model.train(), **settings)
    for _ in range(3):
        model(BLOCKS, labels=BLOCKS).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        both = [result["weights"][name] for result in results]
        assert torch.equal(*both), name
        moved = (parameter - start[name]).norm()
        # Gradients are summed in another order, and Newton-Schulz in bfloat16 amplifies their last bits.
        assert (both[0] - parameter).norm() <= 0.25 * moved, name
