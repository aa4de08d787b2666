"""Configs that ship, which an experiment takes when none is named."""

HEADS = "gpt2-small"
ROUTES = ("bert-base", "gpt2-small", "transformer-2017-base")
