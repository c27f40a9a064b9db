"""Tokens a second while decoding: Kraken against standard tensor parallel on two ranks, and one rank against transformers."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.kraken_first_token import KRAKENS, RATE_MBIT, STANDARD, models_as_data
from benchmarks.namespaces import LOOPBACK, limited
from benchmarks.report import Report, Row, main
from benchmarks.tensor_ranks import Job, Times, measure

from wavetrain import LLM, SamplingParams
from wavetrain.models import GPT
from wavetrain.models.folders import save_folder

FASTER = 1.3
"""Of transformers' ``generate``, on one rank."""


def run(quick: bool) -> Report:
    """Decoding."""
    batches = (1, 4) if quick else (1, 8, 32)
    models = models_as_data(quick)
    job = Job(
        models={n: models[n] for n in (STANDARD, *KRAKENS)},
        batches=batches,
        repeats=2 if quick else 15,
        decode_steps=4,
        prompt=8 if quick else 128,
    )
    notes = [
        "Two ranks: prompts of 128 tokens, then 4 steps of decoding a turn (16 at batch 1), all models in 15 turns, medians; one "
        "thread and core a rank. The limit is the same model without communication.",
    ]
    rows: list[Row] = []
    with limited(RATE_MBIT) as (link, why):
        if link is None or quick:
            notes.append(why or "A quick run is on loopback only.")
        else:
            rows += _rows(measure(link, job), link.label, quick)
    rows += _rows(measure(LOOPBACK, job), LOOPBACK.label, quick)
    rows += _against_transformers(batches, quick, notes)
    return Report(name="kraken_decode", claim="Decoding, fp32, GPT-2's 124 M shape.", rows=tuple(rows), notes=tuple(notes))


def _rows(times: Times, label: str, quick: bool) -> list[Row]:
    rows = []
    for case, names in times.items():
        batch = int(case.split()[1])
        for kraken in KRAKENS:
            ratio, limit = names[STANDARD] / names[kraken], names[STANDARD] / names[f"{kraken}, muted"]
            rows.append(
                Row(
                    case=f"{label}, batch {batch}: {kraken} against standard tensor parallel",
                    target="≥ 1.000×",
                    measured=f"{ratio:.3f}× ({batch / names[kraken]:.1f} / {batch / names[STANDARD]:.1f} tokens/s)",
                    limit=f"{limit:.3f}×",
                    distance=f"{limit / ratio - 1:.1%}",
                    passed=ratio > 0.2 if quick else ratio >= 1,
                )
            )
    return rows


def _against_transformers(batches: tuple[int, ...], quick: bool, notes: list[str]) -> list[Row]:
    try:
        import transformers
    except ImportError:
        notes.append("transformers is not installed: its generate was not run.")
        return []
    shape: dict[str, Any] = {"num_layers": 12, "hidden": 768, "num_heads": 12, "vocab": 50257, "max_length": 1024}
    if quick:
        shape = {"num_layers": 2, "hidden": 64, "num_heads": 4, "vocab": 300, "max_length": 64}
    prompt, new, repeats = (8, 6, 1) if quick else (32, 64, 3)
    torch.manual_seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_folder(GPT(**shape), folder, kind="gpt2")
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
        theirs.eval()
        with LLM(folder, max_num_seqs=max(batches), tokenizer="bytes") as ours:
            for batch in batches:
                tokens = torch.randint(0, shape["vocab"], (batch, prompt))
                params = SamplingParams(max_tokens=new, temperature=0)
                seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
                same = 0.0
                for turn in range(repeats + 1):
                    begin = time.perf_counter()
                    found = ours.generate(tokens.tolist(), params)
                    middle = time.perf_counter()
                    with torch.inference_mode():
                        expected = theirs.generate(
                            tokens,
                            attention_mask=torch.ones_like(tokens),
                            max_new_tokens=new,
                            min_new_tokens=new,
                            do_sample=False,
                            use_cache=True,
                            pad_token_id=0,
                        )
                    if turn:
                        seconds["theirs"].append(time.perf_counter() - middle)
                        seconds["ours"].append(middle - begin)
                    got = torch.tensor([o.outputs[0].token_ids for o in found])
                    same = float((got == expected[:, prompt:]).float().mean())
                ratio = statistics.median(t / o for o, t in zip(seconds["ours"], seconds["theirs"], strict=True))
                fast, slow = (statistics.median(seconds[k]) for k in ("ours", "theirs"))
                rows.append(
                    Row(
                        case=f"one rank, batch {batch}: against transformers' generate, {prompt} tokens in, {new} out",
                        target=f"≥ {FASTER:.1f}×, same tokens",
                        measured=f"{ratio:.2f}× ({batch * new / fast:.1f} / {batch * new / slow:.1f} tokens/s), {same:.1%} alike",
                        passed=(ratio > 0.2 if quick else ratio >= FASTER) and same == 1.0,
                    )
                )
    notes.append(
        f"One rank: GPT-2's own weights' layout with random weights, both sides with {torch.get_num_threads()} threads, greedy, "
        "in turns; seconds of the whole call."
    )
    return rows


if __name__ == "__main__":
    main(run)
