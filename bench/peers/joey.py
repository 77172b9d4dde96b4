"""Train with JoeyNMT: its own data reading, batching and training loop, with a pause between turns."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from joeynmt.config import parse_global_args, set_validation_args
from joeynmt.prediction import prepare
from joeynmt.training import TrainManager
from plain import make_turns
from turns import Turns, read_task

NEVER_ENDING = 10**9


def configure_model(task: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of encoder and decoder. A direction of a recurrent encoder has half the width."""
    size, dropout = task["size"], task["dropout"]
    shared = {
        "num_layers": size["layers"],
        "hidden_size": size["width"],
        "dropout": dropout,
        "embeddings": {"embedding_dim": size["width"], "scale": True, "dropout": dropout},
    }
    if size["kind"] == "transformer":
        stack = {**shared, "type": "transformer", "num_heads": size["heads"], "ff_size": size["inner"]}
        return {"encoder": stack, "decoder": dict(stack)}
    cells = {**shared, "type": "recurrent", "rnn_type": "lstm"}
    attention = {"attention": "bahdanau", "input_feeding": size["feeding"], "init_hidden": "bridge"}
    return {
        "encoder": {**cells, "hidden_size": size["width"] // 2, "bidirectional": True},
        "decoder": {**cells, **attention, "hidden_dropout": dropout},
    }


def configure(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    side = {"level": "word", "voc_file": str(folder / "words.txt"), "voc_limit": task["vocabulary"], "max_length": 512}
    return {
        "name": "bench",
        "joeynmt_version": version("joeynmt"),
        "model_dir": str(folder / f"joey-{task['size']['kind']}-{task['size']['width']}"),
        "use_cuda": task["device"] != "cpu",
        "fp16": task["precision"] != "float32",  # JoeyNMT has no bf16
        "num_workers": 0,
        "data": {
            "train": str(folder / "train"),
            "dev": str(folder / "dev"),
            "dataset_type": "plain",
            "src": {"lang": "source", **side},
            "trg": {"lang": "target", **side},
        },
        "training": {
            "optimizer": "adam",
            "learning_rate": 0.0001,
            "adam_betas": [0.9, 0.98],
            "scheduling": "warmupinversesquareroot",
            "learning_rate_warmup": 1000,
            "clip_grad_norm": task["clip"],
            "loss": "crossentropy",
            "label_smoothing": task["smoothing"],
            "normalization": "tokens",
            "batch_type": "token",
            "batch_size": task["tokens"],
            "epochs": NEVER_ENDING,
            "updates": NEVER_ENDING,
            "validation_freq": NEVER_ENDING,
            "logging_freq": NEVER_ENDING,
            "early_stopping_metric": "loss",
        },
        "testing": {"beam_size": 1, "batch_size": 1, "batch_type": "sentence"},
        "model": {"tied_embeddings": True, "tied_softmax": True, **configure_model(task)},
    }


class TurnTakingManager(TrainManager):  # type: ignore[misc]
    """JoeyNMT's training loop, which waits for its turn before each update."""

    turns: Turns

    def _train_step(self, batch: Any) -> Any:
        self.turns.before()
        loss = super()._train_step(batch)
        self.turns.after(int(batch.src_length.sum()) + int(batch.ntokens))
        return loss


def main() -> None:
    task = read_task()
    turns = make_turns(task["device"])
    torch.set_num_threads(task["threads"])
    folder = Path(task["folder"])
    config = configure(task, folder)
    Path(config["model_dir"]).mkdir(exist_ok=True)
    args = parse_global_args(config, rank=0, mode="train")
    model, train_data, dev_data, _ = prepare(args, rank=0, mode="train")
    manager = TurnTakingManager(
        model=model,
        model_dir=args.model_dir,
        device=args.device,
        n_gpu=args.n_gpu,
        rank=0,
        num_workers=0,
        autocast=args.autocast,
        seed=args.seed,
        train_args=args.train,
        dev_args=set_validation_args(args.test),
    )
    manager.turns = turns
    parameters = sum(p.numel() for p in model.parameters())
    turns.ready(version=f"{version('joeynmt')} on torch {torch.__version__}", parameters=parameters)
    manager.train_and_validate(train_data=train_data, valid_data=dev_data)


if __name__ == "__main__":
    main()
