"""Each family is one record of data: how its config.json reads as a Spec, and what its checkpoints call our weights."""

from typing import Any

from gptcli.errors import GptcliError, nearest
from gptcli.families import encoders, experts, gemma, gpt, llama, others, seq2seq
from gptcli.families.record import Family, Stored

__all__ = ["FAMILIES", "OWN", "Family", "Stored", "family_of"]

# This project's own names, as a YAML config beside weights implies.
OWN = Family()

FAMILIES: dict[str, Family] = {
    **gpt.RECORDS,
    **llama.RECORDS,
    **gemma.RECORDS,
    **experts.RECORDS,
    **others.RECORDS,
    **encoders.RECORDS,
    **seq2seq.RECORDS,
}


def family_of(config: dict[str, Any], where: str) -> Family:
    """The record of a config.json's model_type. Raises GptcliError naming the nearest that is known."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        said = f"model_type {kind!r} is not implemented" if kind is not None else "no model_type"
        hint = f"{nearest(kind, FAMILIES)} known: {', '.join(FAMILIES)}".strip()
        raise GptcliError(f"{where}: {said}", hint, "family")
    return FAMILIES[kind]
