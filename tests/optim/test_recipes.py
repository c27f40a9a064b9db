"""OptEx in training loops that are not ours: compiled models, Hugging Face's Trainer, Lightning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optim.problems import Task, flat, network
from tests.optim.test_optex import trained
from wavetrain.errors import InputError
from wavetrain.optim import OptEx
from wavetrain.view.chart import line_chart


def adam(model: nn.Module, parallel: int) -> OptEx:
    return OptEx(torch.optim.Adam(model.parameters(), lr=0.01), parallel=parallel)


def test_minibatches_that_were_handed_over_before() -> None:
    """As a loop with gradient accumulation does: N losses, then ``step()`` without arguments."""
    model = network()
    task, opt = Task(model), adam(model, 3)
    for r in range(5):
        for i in range(3):
            opt.later(partial(task.loss, 3 * r + i))
        opt.step()
    same, _ = trained(5, lambda p: torch.optim.Adam(p, lr=0.01))
    assert torch.equal(flat(model), flat(same))
    for _ in range(4):
        opt.later(lambda: task.loss(0))
    with pytest.raises(InputError, match="a round has 3 minibatches, but 4 were kept"):
        opt.step()
    with pytest.raises(InputError, match=r"opt\.later"):
        opt.step()
    with pytest.raises(InputError, match="got Tensor"):
        opt.later(task.loss(0))  # type: ignore[arg-type]


def test_what_is_left_at_the_end_of_an_epoch_is_used_several_times() -> None:
    models = network(), network()
    for model, order in zip(models, ([0, 1], [0, 1, 0]), strict=True):
        task, opt = Task(model), adam(model, 3)
        for i in order:
            opt.later(partial(task.loss, i))
        opt.step()
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_a_compiled_model() -> None:
    model, same = network(), network()
    compiled: Any = torch.compile(model, backend="eager")
    for one, called in ((model, compiled), (same, same)):
        task, opt = Task(called), adam(one, 3)
        for r in range(5):
            opt.step(lambda i, r=r, task=task: task.loss(3 * r + i))
    assert torch.equal(flat(model), flat(same))


def test_a_picture_of_its_rounds() -> None:
    _, opt = trained(6, lambda p: torch.optim.Adam(p, lr=0.01))
    chart = line_chart(opt.stats.curves(), title="rounds", x_label="round")
    assert "steps taken" in chart
    assert "cosine of predictions" in chart


def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    class OptExTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]  # as in docs/optex.md
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            inputs = self._prepare_inputs(inputs)
            opt = self.optimizer.optimizer
            opt.later(lambda: self.compute_loss(model, inputs))
            return torch.tensor(opt.stats.last.loss / opt.parallel if len(opt.stats) else 0.0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.mse_loss(self.net(x), labels)}

    x, y = Task(nn.Identity(), size=64).batch(0)
    model = Model()
    opt = adam(model, 4)
    trainer = OptExTrainer(
        model=model,
        args=transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=opt.parallel,
            max_steps=12,
            max_grad_norm=0,
            learning_rate=0.01,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"x": a, "labels": b} for a, b in zip(x, y, strict=True)],
        optimizers=(opt, torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.5, 12)),
    )
    before = float(nn.functional.mse_loss(model.net(x), y).detach())
    trainer.train()
    assert len(opt.stats) == 12
    assert float(nn.functional.mse_loss(model.net(x), y).detach()) < 0.5 * before
    assert opt.param_groups[0]["lr"] == pytest.approx(0.005)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # as in docs/optex.md
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = network()
            self.group: list[Any] = []

        def configure_optimizers(self) -> OptEx:
            return adam(self.net, 4)

        def training_step(self, batch: Any, index: int) -> None:
            self.group.append(batch)
            if len(self.group) == 4:
                left = iter(self.group)
                self.optimizers().step(lambda: self.loss(next(left)))
                self.group = []

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

    x, y = Task(nn.Identity(), size=64).batch(0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    module = Module()
    before = float(module.loss((x, y)).detach())
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader)
    assert float(module.loss((x, y)).detach()) < 0.5 * before
