"""Owns the wording of the demo checkpoint's model card; every number in it comes from the training record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CARD = """\
---
license: psf-2.0
language: en
---

# tandem-demo

A very small causal language model ({num_parameters:,} parameters, Qwen3 architecture, bfloat16) that ships with
Tandem so that the first run needs no download, and so that speculative decoding, KV quantisation and prefix caching
can be judged on a model with real statistics instead of noise. It answers questions about Python's standard library
in a ChatML conversation and stops by itself. It remembers some documentation and invents the rest: do not rely on it.

## Text

{corpus}: source files as plain text, and chats built from docstrings, signatures and the help topics. That text is
under the PSF License Agreement; greetings and question wordings are this project's own. Nothing was downloaded.
Tests, encodings, idlelib, lib2to3, distutils and tkinter are left out. sha256 of the corpus: `{corpus_sha256}`.

## Training

    python -m tools.train_demo --out demo/tandem-demo

{num_steps} steps of Muon and AdamW (seed {seed}), {num_tokens_seen:,} tokens, {minutes} CPU minutes on {hardware}.
The result depends on the seed, the steps and the Python whose library is read; `training.json` has every setting and
the loss curve. Most rows are {row_tokens} tokens long; every {long_row_every}th step is one row of {long_tokens}
tokens, which is also the longest context.

## Held-out text

About 2 % of the source files, with the chats made from them, were kept from training. Plain text is measured in
windows of {evaluation_length} tokens, chats each from their beginning and on the assistant's tokens only. The weights
are as stored, in bfloat16; the arithmetic is float32.

| | perplexity per token | bits per byte | tokens |
|---|---|---|---|
| plain text | {plain[perplexity]:.2f} | {plain[bits_per_byte]:.3f} | {plain[num_tokens]:,} |
| chat answers | {chat[perplexity]:.2f} | {chat[bits_per_byte]:.3f} | {chat[num_tokens]:,} |
"""


def model_card(record: Mapping[str, Any]) -> str:
    """The README of the checkpoint, from the contents of `training.json`."""
    settings = record["settings"]
    return CARD.format(
        num_parameters=record["num_parameters"],
        corpus=record["corpus"],
        corpus_sha256=record["corpus_sha256"],
        num_steps=settings["num_steps"],
        seed=settings["seed"],
        num_tokens_seen=record["num_tokens_seen"],
        minutes=round(record["cpu_time_s"] / 60),
        hardware=record["hardware"],
        row_tokens=settings["row_length"] - 1,
        long_row_every=settings["long_row_every"],
        long_tokens=settings["long_row_length"] - 1,
        evaluation_length=settings["evaluation_length"],
        plain=record["held_out"]["plain"],
        chat=record["held_out"]["chat"],
    )
