"""gptcli: a microscope for GPT checkpoints.

import gptcli

m = gptcli.open("./gpt2")             # headers and configs only: no torch yet
m.spec, m.layout, m.tokens            # what it is
m.logits("The cat sat on the")        # [T, V]
m.topk("The cat sat on the", k=5)     # the report that `gptcli topk` prints
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gptcli.api import Opened

__version__ = "0.1.0"


def open(
    model: str | None = None,
    *,
    config: str | None = None,
    seed: int = 0,
    offline: bool = False,
    device: str = "auto",
    dtype: str = "auto",
) -> "Opened":
    """Opens what `--model` and `--config` name on the command line; the worked example when neither is given.

    device and dtype: as `--device` and `--dtype`. Raises gptcli.errors.GptcliError, which says what to do instead.
    """
    from gptcli.api import Opened
    from gptcli.source import open_model

    return Opened(open_model(model, config, seed, offline), device, dtype)
